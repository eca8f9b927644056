"""The model on one rank: Megatron's decoder with packed rows, log-probs in place of logits, and every way to cut it."""
