"""From per-token losses to one number: a weight per token, computed from the whole step before it is cut into parts.

The loss of a step is sum(weight * token_loss). Because the weights carry the denominators of the whole step, the sum
over any partition into ranks, micro-batches and packed rows is the same, and so is its gradient.

Two aggregations: the mean over executions of each execution's token mean (default; siblings of a fan-out share their
execution's mean, weighted by tokens), or the mean over all trained tokens (`--calculate-per-token-loss`; DAPO).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


def token_weights(mask_S: Sequence[FloatArray], execution_S: Sequence[int], *, per_token: bool) -> list[FloatArray]:
    """Weight of every response token of one optimizer step, for each sample [R]; zero where masked.

    `mask_S`: loss mask of each sample [R], 0 or 1 (or any weight >= 0). `execution_S`: execution id of each sample. An
    execution without trained tokens contributes zero but stays in the denominator, as a filtered answer does. The
    weights of a step sum to at most 1.
    """
    assert len(mask_S) == len(execution_S), f"{len(mask_S)} masks for {len(execution_S)} samples"
    totals = [float(np.sum(m, dtype=np.float64)) for m in mask_S]
    if per_token:
        denominator = sum(totals)
        return [_divide(m, denominator) for m in mask_S]
    per_execution: dict[int, float] = {}
    for execution, total in zip(execution_S, totals, strict=True):
        per_execution[execution] = per_execution.get(execution, 0.0) + total
    num = len(per_execution)
    return [_divide(m, per_execution[e] * num) for m, e in zip(mask_S, execution_S, strict=True)]


def _divide(mask: FloatArray, denominator: float) -> FloatArray:
    if denominator == 0:
        return np.zeros_like(mask, np.float32)
    return (np.asarray(mask, np.float64) / denominator).astype(np.float32)
