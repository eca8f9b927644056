#!/usr/bin/env bash
# GRPO of SmolLM2-135M-Instruct on sums in three turns with hints, played by an agent with OpenAI's SDK, on two CPU
# cores: `slime recipe game`, or this script with further flags for the loop. Environment: PY (python), SEED, RUN_DIR.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
if test -f "$root/pyproject.toml"; then cd "$root"; fi
PY=${PY:-.venv/bin/python}
SEED=${SEED:-1234}
# See recipes/demo/run.sh.
if grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo || ls /dev/nvidia[0-9]* >/dev/null 2>&1; then DTYPE=--bf16; else DTYPE=--no-bf16; fi
RUN_DIR=${RUN_DIR:-runs/game-$(date +%Y%m%d-%H%M%S)}

"$PY" -m slime.cli.recipes.demo.prepare --out assets/demo --model assets/smollm2-135m-instruct

"$PY" -m slime train \
  --hf-checkpoint assets/smollm2-135m-instruct \
  --run-dir "$RUN_DIR" \
  --device auto --colocate \
  --seed "$SEED" --rollout-seed "$SEED" \
  \
  --prompt-data assets/demo/train.jsonl --input-key prompt --label-key label --metadata-key metadata \
  --rollout-shuffle \
  --custom-generate-function-path slime.cli.recipes.game.play:generate --reward-key solved \
  --num-rollout 6 --rollout-batch-size 8 --n-samples-per-prompt 8 \
  --rollout-max-response-len 8 --rollout-temperature 1.0 \
  \
  --eval-prompt-data sums assets/demo/eval.jsonl \
  --eval-interval 6 --eval-temperature 0 \
  --custom-eval-rollout-log-function-path slime.cli.recipes.game.play:log_eval \
  \
  --use-dynamic-batch-size --max-tokens-per-gpu 2048 \
  --advantage-estimator grpo --eps-clip 0.2 \
  --lr 5e-5 --lr-decay-style constant --weight-decay 0 --adam-beta2 0.95 --clip-grad 1.0 \
  "$DTYPE" \
  "$@"

cat "$RUN_DIR/report.md"
echo "page: $RUN_DIR/report.html, picture: $RUN_DIR/report.png"
