"""From per-token losses to one number: a weight per token, computed from the whole step before it is cut into parts.

The loss of a step is sum(weight * token_loss). Because the weights carry the denominators of the whole step, the sum
over any partition into ranks, micro-batches and packed rows is the same, and so is its gradient. With m the mask and N
the number of executions of the step:

    sequence_mean     m / (tokens of its execution * N)   GRPO (arXiv:2402.03300); siblings share their execution's mean
    token_mean        m / (trained tokens of the step)    DAPO (arXiv:2503.14476)
    sequence_sum      m / N
    constant_length   m / (N * constant_length)           Dr. GRPO (arXiv:2503.20783)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slime.core.errors import ConfigError

AGGREGATIONS = ("sequence_mean", "token_mean", "sequence_sum", "constant_length")

Array = npt.NDArray[np.float64]


def token_weights(
    mask_S: Sequence[npt.NDArray[Any]],
    execution_S: Sequence[int],
    *,
    kind: str = "sequence_mean",
    constant_length: float | None = None,
    count_masked: bool = True,
) -> list[Array]:
    """Weight of every response token of one optimizer step, for each sample [R] float64; zero where masked.

    `mask_S`: loss mask of each sample [R], 0 or 1 (or any weight >= 0). `execution_S`: execution id of each sample. An
    execution without trained tokens contributes zero but counts in N, as a filtered answer does, unless `count_masked`
    is false. Samples that shall not count at all (unscored ones) are not passed. Raises `ConfigError` on an unknown
    kind or a constant length that is not positive.
    """
    assert len(mask_S) == len(execution_S), f"{len(mask_S)} masks for {len(execution_S)} samples"
    totals = [math.fsum(np.asarray(m, np.float64).tolist()) for m in mask_S]
    if kind == "token_mean":
        denominator = math.fsum(totals)
        return [_divide(m, denominator) for m in mask_S]
    per_execution: dict[int, float] = {}
    for execution, total in zip(execution_S, totals, strict=True):
        per_execution[execution] = per_execution.get(execution, 0.0) + total
    num = sum(count_masked or total > 0 for total in per_execution.values())
    if kind == "sequence_mean":
        return [_divide(m, per_execution[e] * num) for m, e in zip(mask_S, execution_S, strict=True)]
    if kind == "sequence_sum":
        return [_divide(m, num) for m in mask_S]
    if kind == "constant_length":
        if not constant_length or constant_length < 0:
            raise ConfigError(
                f"got --loss-constant-length {constant_length}, because constant_length divides by it; give a number "
                "of tokens, for example the longest response"
            )
        return [_divide(m, num * constant_length) for m in mask_S]
    raise ConfigError(f"got --loss-aggregation {kind!r}; choose one of {', '.join(AGGREGATIONS)}")


def _divide(mask: npt.NDArray[Any], denominator: float) -> Array:
    if denominator == 0:
        return np.zeros(mask.shape, np.float64)
    weights: Array = np.asarray(mask, np.float64) / denominator
    return weights
