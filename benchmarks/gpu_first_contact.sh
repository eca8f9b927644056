#!/usr/bin/env bash
# Colocated GRPO on one GPU with train.py: bf16, weights over CUDA IPC, verified, memory saver on. Ten steps of the demo
# task with SmolLM2-135M, then five with random weights in the shape of Qwen3-0.6B. The time of each part of a step is
# in <run>/metrics.jsonl. Environment: PY (python), OUT (where the runs go), ENGINE_FLAGS (SGLang flags of this host).
set -euo pipefail
cd "$(dirname "$0")/.."
PY=${PY:-python3}
OUT=${OUT:-runs}
ENGINE_FLAGS=${ENGINE_FLAGS:-}
COMMON=(--device cuda --colocate --bf16 --update-weight-transport tensor
        --prompt-data assets/demo/train.jsonl --input-key prompt --label-key label --metadata-key metadata
        --apply-chat-template --rollout-shuffle --advantage-estimator grpo
        --lr-decay-style constant --weight-decay 0 --clip-grad 1.0)

# shellcheck disable=SC2086
"$PY" train.py "${COMMON[@]}" $ENGINE_FLAGS \
  --hf-checkpoint assets/smollm2-135m-instruct --run-dir "$OUT/gpu-smollm2" --lr 2e-5 \
  --num-rollout 10 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 16 \
  --eval-prompt-data sums assets/demo/eval.jsonl --eval-interval 10 --eval-temperature 0 --eval-max-response-len 16 \
  --use-dynamic-batch-size --max-tokens-per-gpu 16384

# shellcheck disable=SC2086
"$PY" train.py "${COMMON[@]}" $ENGINE_FLAGS \
  --hf-checkpoint assets/qwen3-0.6b-random --run-dir "$OUT/gpu-qwen3" --custom-rm-path benchmarks.rewards:parity \
  --lr 1e-6 --num-rollout 5 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 512 \
  --use-dynamic-batch-size --max-tokens-per-gpu 16384
