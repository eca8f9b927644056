"""m / N: the mean over executions of the sums of their tokens, so that long answers weigh more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from slime.algorithms.aggregation import AGGREGATIONS, Aggregation, Array, divided, num_counted, tokens_per_execution


@AGGREGATIONS.register("sequence_sum")
@dataclass(frozen=True, kw_only=True)
class SequenceSum(Aggregation):
    """Every token weighs the same, whatever the length of the step's other answers."""

    def token_weights(
        self, mask_S: Sequence[npt.NDArray[Any]], execution_S: Sequence[int], *, count_masked: bool = True
    ) -> list[Array]:
        """See `Aggregation`."""
        num = num_counted(tokens_per_execution(mask_S, execution_S), count_masked)
        return [divided(m, num) for m in mask_S]
