"""m / (trained tokens of the step): the mean over tokens (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy.typing as npt

from slime.algorithms.aggregation import AGGREGATIONS, Aggregation, Array, divided, trained_tokens


@AGGREGATIONS.register("token_mean")
@dataclass(frozen=True, kw_only=True)
class TokenMean(Aggregation):
    """Every token of the step weighs the same; executions are not counted."""

    counts_executions: ClassVar[bool] = False

    def token_weights(
        self, mask_S: Sequence[npt.NDArray[Any]], execution_S: Sequence[int], *, count_masked: bool = True
    ) -> list[Array]:
        """See `Aggregation`."""
        assert len(mask_S) == len(execution_S), f"{len(mask_S)} masks for {len(execution_S)} samples"
        denominator = math.fsum(trained_tokens(mask_S))
        return [divided(m, denominator) for m in mask_S]
