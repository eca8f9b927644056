# Sourced by the run.sh of a GPU recipe: model, prompts and outputs. The recipe runs in the current folder.
PY=${PY:-python}
: "${MODEL:?give the folder of the model, in Hugging Face format}"
: "${PROMPTS:?give the prompts: JSON lines with the columns prompt and label}"
: "${HELD_OUT:?give the prompts of the evaluation, with the same columns}"
SAVE=${SAVE:-runs/$RECIPE/checkpoints}
RUN_DIR=${RUN_DIR:-runs/$RECIPE}

# Shared by all GPU recipes: mathematics with comparable answers, evaluation that samples from the whole distribution, and
# checkpoints from which the same command resumes.
TASK=(
  --hf-checkpoint "$MODEL" --run-dir "$RUN_DIR"
  --save "$SAVE" --load "$SAVE" --save-interval 20 --save-keep-last 2
  --prompt-data "$PROMPTS" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
  --rm-type deepscaler
  --eval-prompt-data held_out "$HELD_OUT" --eval-interval 20 --eval-top-p 1
)
# Adam with a small, constant learning rate; recomputed activations; dynamic micro-batches with a token limit.
TRAINING=(
  --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
  --use-dynamic-batch-size --balance-data
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
