"""Quantised checkpoints that engines serve: their formats, the arithmetic of each, and what engines hold of them."""
