"""Algorithms: advantages, KL, policy losses, off-policy corrections, aggregation.

One idea per file, with its source. Advantages, returns and token weights are NumPy float64 on the host, computed from
the whole batch. Code that needs gradients is torch and keeps the dtype of its inputs.

Shapes: `_R` is the number of response tokens of any number of samples, concatenated; `_S` is the number of samples.
Nothing here knows about ranks, micro-batches or engines, so nothing here can depend on them.
"""
