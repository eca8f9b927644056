"""Loss aggregation: one weight per token, computed from the whole step before it is split.

The loss of a step is sum(weight * token_loss). The weights include the denominators of the whole step, so every split
into ranks, micro-batches and packed rows gives the same loss and gradient.

To add an aggregation, derive a frozen dataclass from `Aggregation` and register it. Its fields become settings. Your
own aggregation is selected by its import path, `--loss-aggregation my_pkg.mine`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from slime.core.batch import mask_totals
from slime.core.errors import ConfigError
from slime.core.registry import Registry
from slime.settings.fields import derived

if TYPE_CHECKING:
    from slime.settings import Args

Array = npt.NDArray[np.float64] | npt.NDArray[np.float32]


class Aggregation(ABC):
    """Weights the token losses of one optimizer step."""

    name: ClassVar[str]
    counts_executions: ClassVar[bool] = True
    """Whether the denominator is the number of executions rather than the number of trained tokens."""

    @abstractmethod
    def token_weights(
        self, mask_S: Sequence[npt.NDArray[Any]], execution_S: Sequence[int], *, count_masked: bool = True
    ) -> list[Array]:
        """Returns the weight of every response token in an optimizer step, [R] per sample, zero where masked: float64,
        or float32 where that loses nothing or is the last operation.

        `mask_S`: loss mask of each sample [R], 0 or 1 (or any weight >= 0). `execution_S`: execution id of each sample.
        An execution without trained tokens contributes nothing but counts towards N, unless `count_masked` is False.
        Unscored samples must not be passed.
        """

    def check(self, args: Args) -> str | None:
        """Returns an error message if the settings conflict, else None. Called before the run starts."""
        return None


AGGREGATIONS: Registry[Aggregation] = Registry(
    "loss aggregation", flag="--loss-aggregation", package="slime.algorithms.aggregation", contract=Aggregation
)


def trained_tokens(mask_S: Sequence[npt.NDArray[Any]]) -> list[float]:
    """Returns the number of trained tokens of each sample, or the sum of their weights."""
    return [mask_totals(np.asarray(m)).total for m in mask_S]


def tokens_per_execution(total_S: Sequence[float], execution_S: Sequence[int]) -> dict[int, float]:
    """Maps each execution id to the number of trained tokens across its samples."""
    assert len(total_S) == len(execution_S), f"{len(total_S)} masks for {len(execution_S)} samples"
    per_execution: dict[int, float] = {}
    for execution, total in zip(execution_S, total_S, strict=True):
        per_execution[execution] = per_execution.get(execution, 0.0) + total
    return per_execution


def num_counted(per_execution: dict[int, float], count_masked: bool) -> int:
    """Returns N, the number of executions. Executions without trained tokens count only with `count_masked`."""
    return sum(count_masked or total > 0 for total in per_execution.values())


def divided(mask: npt.NDArray[Any], denominator: float) -> Array:
    """Returns mask / denominator, or zeros if the denominator is zero."""
    if denominator == 0:
        return np.zeros(mask.shape, np.float64)
    if mask.dtype == np.float32 and mask_totals(mask).is_binary:
        share: Array = mask * np.float32(1.0 / denominator)
        return share
    weights: Array = np.asarray(mask, np.float64) / denominator
    return weights


class Divided(Aggregation):
    """An aggregation that divides the whole mask of a sample by one number, which depends on all samples' totals."""

    @abstractmethod
    def divisors(self, total_S: Sequence[float], execution_S: Sequence[int], *, count_masked: bool) -> list[float]:
        """Returns the divisor of each sample's mask; 0 if its weights are zero. `total_S`: see `trained_tokens`."""

    def token_weights(
        self, mask_S: Sequence[npt.NDArray[Any]], execution_S: Sequence[int], *, count_masked: bool = True
    ) -> list[Array]:
        divisors = self.divisors(trained_tokens(mask_S), execution_S, count_masked=count_masked)
        return [divided(m, divisor) for m, divisor in zip(mask_S, divisors, strict=True)]


@AGGREGATIONS.register("sequence_mean")
@dataclass(frozen=True, kw_only=True)
class SequenceMean(Divided):
    """m / (tokens of the execution * N): the mean over executions of their token means (GRPO, arXiv:2402.03300).

    Every execution has equal weight. Its token mean is over the tokens of all its samples.
    """

    def divisors(self, total_S: Sequence[float], execution_S: Sequence[int], *, count_masked: bool) -> list[float]:
        per_execution = tokens_per_execution(total_S, execution_S)
        num = num_counted(per_execution, count_masked)
        return [per_execution[e] * num for e in execution_S]


@AGGREGATIONS.register("token_mean")
@dataclass(frozen=True, kw_only=True)
class TokenMean(Divided):
    """m / (trained tokens of the step): the mean over tokens (DAPO, arXiv:2503.14476)."""

    counts_executions: ClassVar[bool] = False

    def divisors(self, total_S: Sequence[float], execution_S: Sequence[int], *, count_masked: bool) -> list[float]:
        assert len(total_S) == len(execution_S), f"{len(total_S)} masks for {len(execution_S)} samples"
        return [math.fsum(total_S)] * len(total_S)


@AGGREGATIONS.register("sequence_sum")
@dataclass(frozen=True, kw_only=True)
class SequenceSum(Divided):
    """m / N: the sum over the tokens of an execution, averaged over executions. Long responses weigh more."""

    def divisors(self, total_S: Sequence[float], execution_S: Sequence[int], *, count_masked: bool) -> list[float]:
        return [float(num_counted(tokens_per_execution(total_S, execution_S), count_masked))] * len(total_S)


@AGGREGATIONS.register("constant_length")
@dataclass(frozen=True, kw_only=True)
class ConstantLength(Divided):
    """m / (N * constant_length): all executions have the same divisor, which avoids a length bias (Dr. GRPO,
    arXiv:2503.20783)."""

    loss_constant_length: int = derived(
        lambda s: s.rollout_max_total_response_len or s.rollout_max_response_len,
        lambda s: f"rollout_max_{'total_' if s.rollout_max_total_response_len else ''}response_len",
        gt=0,
        le=100_000_000,
    )
    """Divisor for every execution with constant_length (Dr. GRPO, arXiv:2503.20783). Default:
    --rollout-max-total-response-len if set, else --rollout-max-response-len."""

    def __post_init__(self) -> None:
        if not self.loss_constant_length or self.loss_constant_length < 0:
            raise ConfigError(
                f"constant_length divides by --loss-constant-length, which must be positive, got "
                f"{self.loss_constant_length}; set it to a number of tokens, such as the maximum response length"
            )

    def divisors(self, total_S: Sequence[float], execution_S: Sequence[int], *, count_masked: bool) -> list[float]:
        num = num_counted(tokens_per_execution(total_S, execution_S), count_masked)
        return [float(num * self.loss_constant_length)] * len(total_S)
