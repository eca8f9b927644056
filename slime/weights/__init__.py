"""Weights: the HF <-> Megatron map, what an engine makes of it, the ways of sending it, the proof that it arrived."""
