"""Triton kernels, one file for each op. Nothing imports them but the op itself, when it is called on a GPU."""
