"""Algorithms: advantages, KL, policy losses, off-policy corrections, aggregation.

Each file implements one method and cites its source. Advantages, returns and token weights are NumPy float64 on the
host, computed from the whole batch. Whatever needs a gradient is torch, in the dtype of its inputs.

Shapes: `_R` means the response tokens of any number of samples, end to end; `_S` means samples. Ranks, micro-batches
and engines do not appear here, so results cannot depend on them.
"""
