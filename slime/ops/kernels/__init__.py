"""Triton kernels, one file per op. An op imports its file when it first runs on a GPU."""
