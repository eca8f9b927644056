"""Advantage estimators. They run on the host, on the whole batch, in NumPy float64.

A training rank needs the statistics of the whole batch, but the values of its own samples only. So arrays of a batch
may be computed when they are read (`Computed`), and one value per sample is not written out for statistics (`Spread`).

To add an estimator, derive a frozen dataclass from `AdvantageEstimator` (or `GroupEstimator` in `grpo`) and register
it. Its fields become settings. Your own estimator is selected by its import path, `--advantage-estimator my_pkg.mine`.
Functions shared by several estimators are in `returns`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np
import numpy.typing as npt

from slime.core.registry import Registry
from slime.core.sample import sum_of_rewards
from slime.settings.fields import opt

if TYPE_CHECKING:
    from torch import Tensor

    from slime.settings import Args

Array = npt.NDArray[np.float64]
Arrays = Sequence[npt.NDArray[Any]]
"""One array [R] per sample of the batch, where R is the sample's number of response tokens."""
Trained = npt.NDArray[np.bool_]
"""[R] whether each token is trained."""


class Computed(Sequence[Array]):
    """Arrays of a batch's samples, each computed whenever it is read."""

    def __init__(self, num_samples: int, compute: Callable[[int], Array]) -> None:
        """`compute`: position of a sample -> array [R]. May be called from any thread."""
        self._num_samples, self._compute = num_samples, compute

    def __len__(self) -> int:
        return self._num_samples

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> list[Array]: ...
    def __getitem__(self, index: int | slice) -> Array | list[Array]:
        positions = range(self._num_samples)[index]  # raises IndexError, which ends an iteration
        return self._compute(positions) if isinstance(positions, int) else [self._compute(p) for p in positions]


class Spread(Computed):
    """One value for all trained tokens of a sample, and zero where masked."""

    def __init__(self, values: npt.NDArray[np.float64], masks: Arrays) -> None:
        """`values`: [S]. `masks`: [R] of each sample."""
        super().__init__(len(masks), lambda p: spread(float(values[p]), masks[p]))
        self.values = values


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedBatch:
    """An estimator's input: the columns of a batch of S samples, in batch order, identical on every rank."""

    rewards: Array
    """[S] raw rewards; NaN for an unscored sample, which gets advantage 0 and is excluded from all statistics."""
    groups: npt.NDArray[np.int64]
    """[S] prompt id."""
    executions: npt.NDArray[np.int64]
    """[S] execution id; fan-out siblings share one and count once."""
    masks: Arrays
    """[R] 1.0 where trained; all zero for an unscored sample."""
    log_probs: Arrays | None = None
    """[R] log-probs of the policy before the update, under the full distribution; None unless the estimator
    `reads_log_probs` or a setting needs them."""
    ref_log_probs: Arrays | None = None
    """[R] log-probs of the reference; None without a reference."""
    kl: Arrays | None = None
    """[R] estimated KL to the reference; None without --kl-coef."""
    kl_coef: float = 0.0
    """Weight of the KL penalty in the reward. Every estimator must apply it."""
    token_rewards: Sequence[npt.NDArray[Any] | None] | None = None
    """[R] rewards of the tokens of each sample, in addition to `rewards`, which come at the last trained token. None:
    all are 0."""
    token_versions: Arrays | None = None
    """[R] weight version that sampled each token, or `NOT_SAMPLED`. None: trained tokens count as sampled."""
    rewards_are_final: bool = False
    """Whether the user's hook computed what is compared within a group. `totals` are then `rewards`."""
    values: Arrays | None = None
    """[R] values of the critic before its update; None unless the estimator `needs_critic`."""

    def computed(self, compute: Callable[[int], Array]) -> Computed:
        """Returns the arrays that `compute` makes of the position of each sample."""
        return Computed(len(self.masks), compute)

    @property
    def kl_S(self) -> Sequence[npt.NDArray[Any] | None]:
        """The KL [R] of each sample; without --kl-coef, None for each sample."""
        return self.kl if self.kl is not None else (None,) * len(self.masks)

    @property
    def token_rewards_S(self) -> Sequence[npt.NDArray[Any] | None]:
        """The token rewards [R] of each sample; None where all are 0."""
        return self.token_rewards if self.token_rewards is not None else (None,) * len(self.masks)

    @property
    def totals(self) -> Array:
        """[S] reward plus token rewards of each sample, which estimators compare that give a sample one advantage."""
        if self.token_rewards is None or self.rewards_are_final:
            return self.rewards
        pairs = zip(self.token_rewards, self.masks, strict=True)
        return self.rewards + [0.0 if rewards is None else sum_of_rewards(rewards, mask) for rewards, mask in pairs]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The output of an estimator: one float64 array [R] per sample, zero where masked."""

    advantages: Arrays
    returns: Arrays | None = None
    """The returns that the critic is trained to predict; None without a critic."""


class AdvantageEstimator(ABC):
    """Turns rewards into advantages."""

    name: ClassVar[str]
    default_policy_loss: ClassVar[str] = "ppo_clip"
    """Default of --policy-loss."""
    needs_critic: ClassVar[bool] = False
    """Whether a value model is trained alongside the policy (see `CriticEstimator`)."""
    whitens: ClassVar[bool] = False
    """Default for --normalize-advantages: whether advantages are whitened over the batch."""
    reads_log_probs: ClassVar[bool] = False
    """Whether the estimator reads `log_probs`, which requires a forward pass before the update."""
    compares_within_group: ClassVar[bool] = False
    """Whether the estimator compares responses to the same prompt. If so, a group of one has no learning signal."""
    compares_turns: ClassVar[bool] = False
    """Whether the estimator compares each turn separately, so that responses with equal totals can differ."""

    @abstractmethod
    def estimate(self, batch: RewardedBatch) -> Estimate:
        """Computes advantages, before distillation and whitening. All ranks must get the same result."""

    def scores(self, batch: RewardedBatch) -> Array:
        """Returns the rewards [S] that advantages are made of: normalised if the estimator compares within groups."""
        return batch.rewards

    def check(self, args: Args) -> str | None:
        """Returns an error message if the settings conflict, else None. Called before the run starts."""
        return None


@dataclass(frozen=True, kw_only=True)
class CriticEstimator(AdvantageEstimator):
    """An estimator that trains a critic, with the critic's loss."""

    needs_critic: ClassVar[bool] = True

    value_clip: float = opt(0.2, gt=0, le=1e9)
    """Clip range for the change of a value per update (PPO)."""

    def value_loss(self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (loss [R], 1.0 where the loss was clipped [R]), zero where masked; differentiable in `values`."""
        from slime.algorithms.token_losses import value_loss

        return value_loss(values, old_values, returns, mask, value_clip=self.value_clip)


ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    flag="--advantage-estimator",
    package="slime.algorithms.advantages",
    contract=AdvantageEstimator,
)


def where_trained(values: Sequence[npt.NDArray[Any]], masks: Arrays) -> tuple[npt.NDArray[Any], ...]:
    """Zeroes masked values."""
    return tuple(kept(v, m) for v, m in zip(values, masks, strict=True))


def kept(values: npt.NDArray[Any], mask: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns values [R] with zeros where masked: `values` itself if all tokens are trained."""
    trained = is_trained(mask)
    return values if trained.all() else np.where(trained, values, 0.0)


def is_trained(mask: npt.NDArray[Any]) -> Trained:
    """Returns [R] whether each token is trained. `mask`: weights, or this function's own result."""
    mask = np.asarray(mask)
    return mask if mask.dtype == np.bool_ else mask > 0


def spread(value: float, mask: npt.NDArray[Any]) -> Array:
    """Returns [R]: `value` at each trained token, zero where masked."""
    return kept(np.full(len(mask), value, np.float64), mask)
