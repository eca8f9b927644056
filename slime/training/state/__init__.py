"""Weights and optimizer state on their way to and from files, the host and Hugging Face names."""
