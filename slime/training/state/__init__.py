"""Moves weights and optimizer state to and from files, host memory and Hugging Face names."""
