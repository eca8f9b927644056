"""Algorithms: advantages, KL, policy losses, off-policy corrections, aggregation.

Pure tensor functions, one idea per file.

Shapes: `_T` stands for the response tokens of any number of samples, end to end; `_S` for samples. Nothing here knows
about ranks, micro-batches or engines, so nothing here can depend on them.
"""
