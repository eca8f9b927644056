"""Quantised checkpoints that engines serve: formats, arithmetic, and the tensors that engines hold."""
