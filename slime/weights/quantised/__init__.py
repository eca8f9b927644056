"""Quantised checkpoints that engines serve: formats, their arithmetic, and the tensors that engines hold."""
