"""Megatron's decoder of a family's layers, log-probs in place of logits, every way to split it."""
