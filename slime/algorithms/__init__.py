"""Algorithms: advantages, KL, policy losses, off-policy corrections and loss aggregation.

Each file implements one method and cites its source. Advantages, returns and token weights are computed on the host
from the whole batch, in NumPy float64. Everything differentiable is torch, in the dtype of its inputs.

Shapes: `_R` is response tokens, of one sample or of several concatenated; `_S` is samples. Nothing here depends on
ranks, micro-batches or engines, so neither do the results.
"""
