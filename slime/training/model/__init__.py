"""Megatron's decoder with a family's layers and log-probs instead of logits, split over ranks in every way."""
