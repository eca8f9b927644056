#!/usr/bin/env bash
# A coding agent in sandboxes: GRPO of SmolLM2-135M-Instruct on two CPU cores. Run `slime recipe coding_agent`, or this
# script; more flags are passed to train.py. Environment: PY (python), SEED, RUN_DIR, HARNESS (small_agent, claude_code,
# codex, opencode), CONFIG (a copy of settings.yaml), DATA (tasks of your own, which repository.py writes).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
CONFIG=$(realpath "${CONFIG:-$here/settings.yaml}") DATA=${DATA:+$(realpath "$DATA")} # host.sh may change the folder
. "$here/../host.sh"
RUN_DIR=${RUN_DIR:-runs/coding_agent-$(date +%Y%m%d-%H%M%S)} HARNESS=${HARNESS:-small_agent}
TASKS=assets/coding_agent/$(basename "${DATA:-train}" .jsonl)-$HARNESS.jsonl # a run with other tasks keeps its own

run "$PY" -m slime.cli.recipes.coding_agent.prepare --out "$TASKS" --harness "$HARNESS" \
  --config "$CONFIG" ${DATA:+--data "$DATA"}

run "$PY" -m slime train \
  --hf-checkpoint assets/smollm2-135m-instruct \
  --run-dir "$RUN_DIR" \
  --device auto --colocate \
  --seed "$SEED" --rollout-seed "$SEED" \
  \
  --prompt-data "$TASKS" --input-key prompt --label-key label --metadata-key metadata \
  --rollout-shuffle \
  --custom-generate-function-path slime.cli.recipes.coding_agent.generate:generate \
  --custom-config-path "$CONFIG" \
  --num-rollout 4 --rollout-batch-size 4 --n-samples-per-prompt 4 \
  --rollout-max-response-len 200 --rollout-temperature 0.8 \
  \
  --use-dynamic-batch-size --max-tokens-per-gpu 4096 \
  --advantage-estimator grpo --eps-clip 0.2 \
  --lr 1e-5 --lr-decay-style constant --weight-decay 0 --adam-beta2 0.95 --clip-grad 1.0 \
  "$DTYPE" \
  --override "$@"
