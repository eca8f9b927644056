"""Quantised checkpoints for engines: formats, arithmetic, and the tensors to send."""
