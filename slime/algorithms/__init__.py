"""Algorithms: advantages, KL, policy losses, off-policy corrections, aggregation.

One idea per file, with its source. Advantages, returns and token weights are NumPy float64 on the host, from the whole
batch; what needs a gradient is torch and keeps the dtype that it is given.

Shapes: `_R` stands for the response tokens of any number of samples, end to end; `_S` for samples. Nothing here knows
about ranks, micro-batches or engines, so nothing here can depend on them.
"""
