"""Toy tasks for models of a few hundred thousand parameters with a character tokenizer; minutes on one core."""
