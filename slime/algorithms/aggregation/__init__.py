"""From per-token losses to one number: a weight per token, computed from the whole step before it is split.

The loss of a step is sum(weight * token_loss). Because the weights carry the denominators of the whole step, the sum
over any partition into ranks, micro-batches and packed rows is the same, and so is its gradient.

One file per aggregation: derive a frozen dataclass from `Aggregation`, whose fields are its settings, and register it.
A user's own is named by its path: `--loss-aggregation my_pkg.mine`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from slime.core.registry import Registry

if TYPE_CHECKING:
    from slime.settings import Args

Array = npt.NDArray[np.float64]


class Aggregation(ABC):
    """How the losses of the tokens of one optimizer step are added up."""

    name: ClassVar[str]
    counts_executions: ClassVar[bool] = True
    """Whether the number of executions is a denominator; otherwise that of trained tokens is."""

    @abstractmethod
    def token_weights(
        self, mask_S: Sequence[npt.NDArray[Any]], execution_S: Sequence[int], *, count_masked: bool = True
    ) -> list[Array]:
        """Weight of every response token of one optimizer step, for each sample [R] float64; zero where masked.

        `mask_S`: trained tokens of each sample [R], 0 or 1 (or any weight >= 0). `execution_S`: its execution id. An
        execution without trained tokens contributes zero but counts in N, as a filtered answer does, unless
        `count_masked` is false. Samples that are not to count at all (unscored ones) are not passed.
        """

    def check(self, args: Args) -> str | None:
        """What cannot work together (got / because / do), before anything starts; None if nothing."""
        return None


AGGREGATIONS: Registry[Aggregation] = Registry(
    "loss aggregation", flag="--loss-aggregation", package="slime.algorithms.aggregation", contract=Aggregation
)


def trained_tokens(mask_S: Sequence[npt.NDArray[Any]]) -> list[float]:
    """Trained tokens (or the sum of their weights) of each sample."""
    return [math.fsum(np.asarray(m, np.float64).tolist()) for m in mask_S]


def tokens_per_execution(mask_S: Sequence[npt.NDArray[Any]], execution_S: Sequence[int]) -> dict[int, float]:
    """Execution id -> trained tokens of all its samples."""
    assert len(mask_S) == len(execution_S), f"{len(mask_S)} masks for {len(execution_S)} samples"
    per_execution: dict[int, float] = {}
    for execution, total in zip(execution_S, trained_tokens(mask_S), strict=True):
        per_execution[execution] = per_execution.get(execution, 0.0) + total
    return per_execution


def num_counted(per_execution: dict[int, float], count_masked: bool) -> int:
    """N: the executions of the step, those without a trained token only if `count_masked`."""
    return sum(count_masked or total > 0 for total in per_execution.values())


def divided(mask: npt.NDArray[Any], denominator: float) -> Array:
    """The mask over a denominator; zeros if that is zero."""
    if denominator == 0:
        return np.zeros(mask.shape, np.float64)
    weights: Array = np.asarray(mask, np.float64) / denominator
    return weights
