"""Corrections for tokens that another policy sampled: weights and masks without a gradient of their own."""
