"""Zero mean and unit variance over all trained tokens of a batch (REINFORCE++, arXiv:2501.03262).

Two passes with exact sums (Shewchuk 1997, `math.fsum`): the difference of two large moments, which fails at an offset
of 1000 in float32, is never taken, and the order of the samples cannot matter. The variance divides by N - 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

WHITEN_EPSILON = 1e-8
"""Added to the variance."""

Array = npt.NDArray[np.float64]


def whiten(advantages_SR: Sequence[npt.NDArray[Any]], mask_S: Sequence[npt.NDArray[Any]]) -> list[Array]:
    """Whitened advantages of each sample [R], zero where masked.

    All zeros if there are fewer than two trained tokens or all have the same advantage. Tokens count, so long
    responses weigh more; a sample that is not to count (an unscored one) is passed with a mask of zeros.
    """
    assert len(advantages_SR) == len(mask_S), f"{len(advantages_SR)} advantages for {len(mask_S)} masks"
    keep = [np.asarray(m) > 0 for m in mask_S]
    values = [np.asarray(a, np.float64) for a in advantages_SR]
    tokens = np.concatenate([np.zeros(0), *(a[k] for a, k in zip(values, keep, strict=True))])
    if len(tokens) < 2 or np.ptp(tokens) == 0:
        return [np.zeros(k.shape) for k in keep]
    mean = math.fsum(tokens.tolist()) / len(tokens)
    variance = math.fsum(np.square(tokens - mean).tolist()) / (len(tokens) - 1)
    scale = math.sqrt(variance + WHITEN_EPSILON)
    return [np.where(k, (a - mean) / scale, 0.0) for a, k in zip(values, keep, strict=True)]
