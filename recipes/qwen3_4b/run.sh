#!/usr/bin/env bash
# GRPO of Qwen3-4B on mathematics, on one host with 8 GPUs, shared by training and engines. Run `slime recipe qwen3_4b`,
# or this script; more flags are passed to train.py. Environment: MODEL, PROMPTS, HELD_OUT; SAVE, RUN_DIR, PY
# (docs/recipes.md).
set -euo pipefail
RECIPE=qwen3_4b
. "$(dirname "$0")/../cluster.sh"

exec "$PY" -m slime train "${TASK[@]}" "${TRAINING[@]}" \
  --colocate --actor-num-nodes 1 --actor-num-gpus-per-node 8 \
  --tensor-model-parallel-size 2 --sequence-parallel --max-tokens-per-gpu 9216 \
  --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 \
  \
  --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 \
  --rollout-max-prompt-len 1024 --rollout-max-response-len 8192 --rollout-temperature 1 \
  --n-samples-per-eval-prompt 16 --eval-max-response-len 16384 \
  \
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 \
  --override "$@"
