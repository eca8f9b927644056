#!/usr/bin/env bash
# GSPO of GLM-4.7 (355B, 32B active per token) on 8 hosts with 8 GPUs each, shared by training and two engines. Run this
# script on one of the hosts of a Ray cluster. More flags are passed to train.py. Environment: RAY_ADDRESS, MODEL,
# PROMPTS, HELD_OUT; SAVE, RUN_DIR, PY (docs/recipes.md).
set -euo pipefail
RECIPE=glm_4_7
. "$(dirname "$0")/../cluster.sh"
: "${RAY_ADDRESS:?give the address of the Ray cluster}"

exec "$PY" -m slime train "${TASK[@]}" "${TRAINING[@]}" \
  --ray-address "$RAY_ADDRESS" --colocate --actor-num-nodes 8 --actor-num-gpus-per-node 8 \
  --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --context-parallel-size 2 \
  --expert-model-parallel-size 16 --max-tokens-per-gpu 16384 \
  --optimizer-cpu-offload \
  --rollout-num-gpus-per-engine 32 --sglang-mem-fraction-static 0.7 \
  --sglang-enable-dp-attention --sglang-dp-size 4 --sglang-ep-size 32 --sglang-enable-dp-lm-head \
  --sglang-moe-dense-tp-size 1 \
  \
  --num-rollout 3000 --rollout-batch-size 128 --over-sampling-batch-size 256 --n-samples-per-prompt 8 \
  --num-steps-per-rollout 4 --dynamic-sampling-filter-path slime.rollout.filters.check_reward_nonzero_std \
  --rollout-max-prompt-len 2048 --rollout-max-response-len 30720 --rollout-temperature 1 \
  --rollout-stop-token-ids 151329 151336 151338 \
  --n-samples-per-eval-prompt 8 --eval-max-response-len 30720 \
  \
  --advantage-estimator gspo --eps-clip 1e-4 --eps-clip-high 2e-4 --use-tis \
  --override "$@"
