#!/usr/bin/env bash
# GRPO of SmolLM2-135M-Instruct on small sums, on two CPU cores: `make demo`, `slime recipe demo`, or this script. More
# flags are passed to train.py. Environment: PY (python), SEED, RUN_DIR. In a checkout, the script runs in the root,
# from an installed package in the current folder.
set -euo pipefail
. "$(dirname "$0")/../host.sh"
RUN_DIR=${RUN_DIR:-runs/demo-$(date +%Y%m%d-%H%M%S)}

run "$PY" -m slime.cli.recipes.demo.prepare --out assets/demo --model assets/smollm2-135m-instruct

run "$PY" -m slime train \
  --hf-checkpoint assets/smollm2-135m-instruct \
  --run-dir "$RUN_DIR" \
  --device auto --colocate \
  --seed "$SEED" --rollout-seed "$SEED" \
  \
  --prompt-data assets/demo/train.jsonl --input-key prompt --label-key label --metadata-key metadata \
  --apply-chat-template --rollout-shuffle \
  --num-rollout 6 --rollout-batch-size 8 --n-samples-per-prompt 8 \
  --rollout-max-response-len 12 --rollout-temperature 0.7 \
  \
  --eval-prompt-data sums assets/demo/eval.jsonl \
  --eval-interval 6 --eval-temperature 0 --eval-max-response-len 12 \
  \
  --use-dynamic-batch-size --max-tokens-per-gpu 1024 \
  --advantage-estimator grpo --eps-clip 0.2 \
  --lr 5e-5 --lr-decay-style constant --weight-decay 0 --adam-beta2 0.95 --clip-grad 1.0 \
  "$DTYPE" \
  --override "$@"
