#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B, a MoE model, on one host with 8 GPUs, shared by training and one engine. Run `slime recipe
# qwen3_30b_a3b`, or this script; more flags are passed to train.py. Environment: MODEL, PROMPTS, HELD_OUT; SAVE,
# RUN_DIR, PY (docs/recipes.md).
set -euo pipefail
RECIPE=qwen3_30b_a3b
. "$(dirname "$0")/../cluster.sh"

exec "$PY" -m slime train "${TASK[@]}" "${TRAINING[@]}" \
  --colocate --actor-num-nodes 1 --actor-num-gpus-per-node 8 \
  --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 --max-tokens-per-gpu 20480 \
  --optimizer-cpu-offload \
  --rollout-num-gpus-per-engine 8 --sglang-ep-size 8 --sglang-mem-fraction-static 0.7 \
  \
  --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 \
  --rollout-max-prompt-len 1024 --rollout-max-response-len 8192 --rollout-temperature 1 \
  --n-samples-per-eval-prompt 16 --eval-max-response-len 16384 \
  \
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --use-tis \
  --use-rollout-routing-replay \
  --override "$@"
