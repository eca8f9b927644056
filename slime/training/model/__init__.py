"""Megatron's decoder with a family's layers, log-probs in place of logits, and every way to split it."""
