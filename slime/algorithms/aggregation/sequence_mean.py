"""m / (tokens of its execution * N): the mean over executions of their token means (GRPO, arXiv:2402.03300).

Siblings share the mean of their execution, weighted by tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from slime.algorithms.aggregation import AGGREGATIONS, Aggregation, Array, divided, num_counted, tokens_per_execution


@AGGREGATIONS.register("sequence_mean")
@dataclass(frozen=True, kw_only=True)
class SequenceMean(Aggregation):
    """Every execution weighs the same."""

    def token_weights(
        self, mask_S: Sequence[npt.NDArray[Any]], execution_S: Sequence[int], *, count_masked: bool = True
    ) -> list[Array]:
        """See `Aggregation`."""
        per_execution = tokens_per_execution(mask_S, execution_S)
        num = num_counted(per_execution, count_masked)
        return [divided(m, per_execution[e] * num) for m, e in zip(mask_S, execution_S, strict=True)]
