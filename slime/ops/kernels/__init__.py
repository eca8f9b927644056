"""Triton kernels, one file for each op, imported only by that op when it runs on a GPU."""
