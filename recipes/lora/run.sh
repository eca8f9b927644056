#!/usr/bin/env bash
# The demo with LoRA: SmolLM2-135M-Instruct on small sums, on two CPU cores. More flags are passed to train.py.
# Environment as in recipes/demo/run.sh.
set -euo pipefail
RUN_DIR=${RUN_DIR:-runs/lora-$(date +%Y%m%d-%H%M%S)} exec bash "$(dirname "$0")/../demo/run.sh" \
  --lora-rank 16 --lr 5e-4 --override "$@"
