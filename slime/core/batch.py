"""`TrainBatch`: the samples of one training step.

The driver passes the batch by reference. Every training rank reads the same batch (from shared memory within a host)
and computes the same schedule, so all ranks agree on the data split. Routed experts make up most of the bytes and can
be stored separately (`Elsewhere`), so each rank only fetches them for its own samples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from slime.core.columns import Numbers
from slime.core.errors import DataError
from slime.core.routed_experts import Ids
from slime.core.sample import NOT_SAMPLED, Sample


class Elsewhere(Protocol):
    """A remotely stored array that `numpy.asarray` fetches."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def digests(self) -> npt.NDArray[np.uint64] | None:
        """[rows] result of `slime.core.routed_experts.digests_of`, to compare arrays without fetching them."""

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]: ...


class MaskTotals(NamedTuple):
    """Sums of a loss mask [R]."""

    num_trained: int
    """Tokens with a positive weight."""
    total: float
    """Exact sum of the weights."""
    is_binary: bool
    """Whether all weights are 0 or 1."""


def mask_totals(mask: npt.NDArray[Any]) -> MaskTotals:
    """Sums a loss mask [R]. A mask of zeros and ones is counted, so its sum is exact without a sum of floats."""
    num_ones = int(np.count_nonzero(mask == 1))
    if num_ones == len(mask) or num_ones + np.count_nonzero(mask == 0) == len(mask):
        return MaskTotals(num_ones, float(num_ones), True)
    return MaskTotals(int(np.count_nonzero(mask > 0)), math.fsum(mask.astype(np.float64).tolist()), False)


class _Remembered:
    """What a sample computes once. Only fields of the dataclass are sent and saved, so this is not."""

    __slots__ = ("_mask_totals",)
    _mask_totals: MaskTotals


@dataclass(frozen=True, slots=True)
class TrainSample(_Remembered):
    """One training sequence of `T` tokens. The last `R = len(loss_mask)` tokens are the response."""

    tokens: npt.NDArray[np.int32]
    """[T]"""
    loss_mask: npt.NDArray[np.float32]
    """[R] 1.0 for tokens that are trained on. All other masks are derived from it. All zeros for an unscored sample."""
    rollout_log_probs: npt.NDArray[np.float32] | None
    """[R] in nats. None: not sampled by an engine (SFT data)."""
    token_versions: npt.NDArray[np.int32]
    """[R] weight version per token, or `NOT_SAMPLED`."""
    reward: float
    """Reward before normalisation. NaN: the sample is unscored and not trained on."""
    group_index: int
    """Prompt id. Advantages are normalised over samples with the same id."""
    index: int
    """Execution id. Fan-out siblings share it and count as one execution."""
    truncated: bool
    teacher_log_probs: npt.NDArray[np.float32] | None = None
    """[R] in nats, for on-policy distillation."""
    token_rewards: npt.NDArray[Any] | None = None
    """[R] rewards of tokens, as in `Sample`, in float32 if that is exact, else float64. None: all are 0."""
    metadata: Any = None
    """The user's `sample.train_metadata` for advantage functions, plain JSON."""
    routed_experts: Ids | Elsewhere | None = None
    """[at most T - 1, layers, topk] experts selected by the engine, from the first token on. None: not recorded."""
    images: tuple[str, ...] = ()
    """Digests of the prompt's images (`slime.core.files`), in the order of their placeholders."""

    def __post_init__(self) -> None:
        if not self.is_scored and self.loss_mask.any():
            object.__setattr__(self, "loss_mask", np.zeros_like(self.loss_mask))

    @property
    def mask_totals(self) -> MaskTotals:
        """The sums of `loss_mask`, computed once."""
        try:
            return self._mask_totals
        except AttributeError:
            object.__setattr__(self, "_mask_totals", totals := mask_totals(self.loss_mask))
            return totals

    @property
    def is_scored(self) -> bool:
        return not math.isnan(self.reward)

    @property
    def response_length(self) -> int:
        return len(self.loss_mask)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @classmethod
    def from_sample(cls, sample: Sample, *, reward: float) -> TrainSample:
        """Freezes a finished sample. Raises `DataError` for an empty prompt, or values that are not finite."""
        sample.validate()
        num_response = sample.response_length
        if sample.prompt_length < 1 and num_response > 0:
            raise DataError(
                f"sample {sample.index} has an empty prompt, so the log-prob of its first response token is undefined"
            )
        if sample.group_index is None or sample.index is None:
            raise DataError(f"a sample has group_index {sample.group_index} and index {sample.index}; set both")
        mask = _as(sample.column("loss_mask"), np.float32)
        mask = np.ones(num_response, np.float32) if mask is None else mask
        if sample.remove_sample:
            mask = np.zeros_like(mask)
        log_probs = _as(sample.column("rollout_log_probs"), np.float32)
        if log_probs is not None and not np.isfinite(log_probs[mask > 0]).all():
            raise DataError(f"sample {sample.index}: a trained token has a non-finite rollout log-prob")
        teacher = _as(sample.column("teacher_log_probs"), np.float32)
        if teacher is not None and not np.isfinite(teacher[mask > 0]).all():
            raise DataError(f"sample {sample.index}: a trained token has a non-finite teacher log-prob")
        versions, rewards = _as(sample.column("token_versions"), np.int32), sample.column("token_rewards")
        if rewards is not None and rewards.dtype != np.float32:
            rewards = np.asarray(rewards, np.float64)
        return cls(
            tokens=np.asarray(sample.column("tokens"), np.int32),
            loss_mask=mask,
            rollout_log_probs=log_probs,
            token_versions=np.full(num_response, NOT_SAMPLED, np.int32) if versions is None else versions,
            reward=float(reward),
            group_index=sample.group_index,
            index=sample.index,
            truncated=sample.status.value == "truncated",
            teacher_log_probs=teacher,
            token_rewards=rewards,
            metadata=copy.deepcopy(sample.attributes.get("train_metadata")),
            routed_experts=None if sample.rollout_routed_experts is None else sample.rollout_routed_experts.ids,
            images=tuple(sample.images),
        )


def _as(column: Numbers | None, dtype: npt.DTypeLike) -> npt.NDArray[Any] | None:
    return None if column is None else np.asarray(column, dtype)


def trains_any(samples: Iterable[TrainSample]) -> bool:
    """Returns whether any token of the samples is trained. Without one, nothing changes, not even the optimizer."""
    return any(sample.mask_totals.num_trained for sample in samples)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """All samples of one step, sorted by (group_index, index), so the order does not depend on the schedule."""

    rollout_id: int
    samples: tuple[TrainSample, ...]

    @property
    def executions(self) -> tuple[int, ...]:
        """[S] each sample's execution number, counted in order of appearance. Fan-out siblings share a number.

        Executions are identified by group and index, because a custom rollout may restart the index at 0 in each group.
        """
        numbers: dict[tuple[int, int], int] = {}
        return tuple(numbers.setdefault((s.group_index, s.index), len(numbers)) for s in self.samples)

    @property
    def num_executions(self) -> int:
        """The denominator of the default loss aggregation."""
        return len(set(self.executions))
