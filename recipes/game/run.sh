#!/usr/bin/env bash
# The demo's sums as a game: GRPO of SmolLM2-135M-Instruct in three turns with hints, played by an agent with OpenAI's
# SDK, on two CPU cores. Run `slime recipe game`, or this script; more flags are passed to train.py. Environment as in
# recipes/demo/run.sh.
set -euo pipefail
RUN_DIR=${RUN_DIR:-runs/game-$(date +%Y%m%d-%H%M%S)} exec bash "$(dirname "$0")/../demo/run.sh" \
  --no-apply-chat-template \
  --custom-generate-function-path slime.cli.recipes.game.play:generate --reward-key solved \
  --custom-eval-rollout-log-function-path slime.cli.recipes.game.play:log_eval \
  --rollout-max-response-len 8 --eval-max-response-len 8 --rollout-temperature 1.0 --override "$@"
