"""Advantages and returns, NumPy float64 on the host, computed from the whole batch.

To add an estimator, derive a frozen dataclass from `AdvantageEstimator` (or from `GroupEstimator` in `grpo`), whose
fields are its settings, and register it. To use your own estimator, pass its import path: `--advantage-estimator
my_pkg.mine`. `returns` has the functions that several estimators share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from slime.core.registry import Registry
from slime.settings.fields import opt

if TYPE_CHECKING:
    from torch import Tensor

    from slime.settings import Args

Array = npt.NDArray[np.float64]
Arrays = tuple[npt.NDArray[Any], ...]
"""One array [R] per sample of the batch, where R is the sample's number of response tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedBatch:
    """The columns of a batch of S samples that an estimator reads, in batch order; the same on every rank."""

    rewards: Array
    """[S] raw rewards; NaN for an unscored sample, which has advantage 0 and is left out of all statistics."""
    groups: npt.NDArray[np.int64]
    """[S] prompt id."""
    executions: npt.NDArray[np.int64]
    """[S] execution id; fan-out siblings share it and count once."""
    masks: Arrays
    """[R] 1.0 where trained; all zero for an unscored sample."""
    log_probs: Arrays | None = None
    """[R] the policy's log-probs before the update, under the full distribution; None unless the estimator
    `reads_log_probs` or a setting needs them."""
    ref_log_probs: Arrays | None = None
    """[R] the reference's log-probs; None without a reference."""
    kl: Arrays | None = None
    """[R] estimated KL to the reference; None without --kl-coef."""
    kl_coef: float = 0.0
    """Weight of the KL in the reward. Every estimator applies it."""
    values: Arrays | None = None
    """[R] the critic's values before its update; None unless the estimator `needs_critic`."""

    @property
    def kl_S(self) -> Sequence[npt.NDArray[Any] | None]:
        """The KL of each sample; None for each sample without --kl-coef."""
        return self.kl if self.kl is not None else (None,) * len(self.masks)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The result of an estimator, per sample [R] float64, zero where masked."""

    advantages: Arrays
    returns: Arrays | None = None
    """The returns that the critic learns to predict; None without a critic."""


class AdvantageEstimator(ABC):
    """Turns rewards into advantages."""

    name: ClassVar[str]
    default_policy_loss: ClassVar[str] = "ppo_clip"
    """The default of --policy-loss."""
    needs_critic: ClassVar[bool] = False
    """Whether a value model is trained along with the policy; see `CriticEstimator`."""
    whitens: ClassVar[bool] = False
    """The default of --normalize-advantages: whether advantages are whitened over the batch."""
    reads_log_probs: ClassVar[bool] = False
    """Whether the estimator reads the policy's log-probs. If so, a forward pass before the update computes them."""
    compares_within_group: ClassVar[bool] = False
    """Whether the estimator compares the responses to a prompt. If so, a group of one has no learning signal."""

    @abstractmethod
    def estimate(self, batch: RewardedBatch) -> Estimate:
        """Returns the advantages of a batch before distillation and whitening. Must be deterministic across ranks."""

    def check(self, args: Args) -> str | None:
        """Returns an error message if these settings contradict each other, else None. Called before the run starts."""
        return None


@dataclass(frozen=True, kw_only=True)
class CriticEstimator(AdvantageEstimator):
    """An estimator with a critic, and the loss of that critic."""

    needs_critic: ClassVar[bool] = True

    value_clip: float = opt(0.2, gt=0, le=1e9)
    """Range of a value's change per update (PPO)."""

    def value_loss(self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (loss [R], differentiable in `values`; 1.0 where the clip took effect [R]), zero where masked."""
        from slime.algorithms.token_losses import value_loss

        return value_loss(values, old_values, returns, mask, value_clip=self.value_clip)


ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    flag="--advantage-estimator",
    package="slime.algorithms.advantages",
    contract=AdvantageEstimator,
)


def where_trained(values: Sequence[npt.NDArray[Any]], masks: Arrays) -> Arrays:
    """Values with zeros where masked."""
    return tuple(np.where(m > 0, v, 0.0) for v, m in zip(values, masks, strict=True))
