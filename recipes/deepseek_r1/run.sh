#!/usr/bin/env bash
# GRPO of DeepSeek-R1 (671B, 37B active per token) on 16 hosts with 8 GPUs each, shared by training and 8 engines. Run
# this script on one of the hosts of a Ray cluster. MODEL is the released folder: engines serve its FP8, the trainer
# computes in bfloat16. More flags are passed to train.py. Environment: RAY_ADDRESS, MODEL, PROMPTS, HELD_OUT; SAVE,
# RUN_DIR, PY (docs/recipes.md).
set -euo pipefail
RECIPE=deepseek_r1
. "$(dirname "$0")/../cluster.sh"
: "${RAY_ADDRESS:?give the address of the Ray cluster}"

exec "$PY" -m slime train "${TASK[@]}" "${TRAINING[@]}" \
  --ray-address "$RAY_ADDRESS" --colocate --actor-num-nodes 16 --actor-num-gpus-per-node 8 \
  --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --context-parallel-size 4 \
  --decoder-last-pipeline-num-layers 13 --expert-model-parallel-size 32 --max-tokens-per-gpu 16384 \
  --optimizer-cpu-offload \
  --rollout-num-gpus-per-engine 16 --sglang-mem-fraction-static 0.8 \
  --sglang-enable-dp-attention --sglang-dp-size 8 --sglang-ep-size 16 --sglang-enable-dp-lm-head \
  --sglang-moe-dense-tp-size 1 \
  \
  --num-rollout 3000 --rollout-batch-size 128 --over-sampling-batch-size 256 --n-samples-per-prompt 8 \
  --num-steps-per-rollout 4 --dynamic-sampling-filter-path slime.rollout.filters.check_reward_nonzero_std \
  --rollout-max-prompt-len 2048 --rollout-max-response-len 30720 --rollout-temperature 1 \
  --n-samples-per-eval-prompt 8 --eval-max-response-len 30720 \
  \
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --use-tis \
  --override "$@"
