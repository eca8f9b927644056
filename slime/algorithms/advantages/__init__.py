"""Advantages and returns, computed in NumPy float64 on the host from the whole batch.

To add an estimator, derive a frozen dataclass from `AdvantageEstimator` (or from `grpo.GroupEstimator`) and register
it; its fields are its settings. A user's own estimator is selected by its path: `--advantage-estimator my_pkg.mine`.
`returns` has the formulas that several estimators share, and whitening. `distillation` applies to any estimator.
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
    """The input of an estimator: a batch of S samples, in the batch's order; the same on every rank."""

    rewards: Array
    """[S] raw rewards; NaN for an unscored sample, which gets advantage 0 and enters no statistic."""
    groups: npt.NDArray[np.int64]
    """[S] prompt id, shared by all samples of one prompt, wherever they are in the batch."""
    executions: npt.NDArray[np.int64]
    """[S] execution id; fan-out siblings share it and count once."""
    masks: Arrays
    """[R] 1.0 where trained, zero throughout an unscored sample."""
    log_probs: Arrays | None = None
    """[R] the policy's log-probs before the update, under the whole distribution; None unless the estimator
    `reads_log_probs` or a setting needs them."""
    ref_log_probs: Arrays | None = None
    """[R] the reference's log-probs; None without a reference."""
    kl: Arrays | None = None
    """[R] estimate of the KL to the reference; None without --kl-coef."""
    kl_coef: float = 0.0
    """Weight of the KL in the reward. Every estimator applies it."""
    values: Arrays | None = None
    """[R] the critic's values before its update; None unless the estimator `needs_critic`."""

    @property
    def kl_S(self) -> Sequence[npt.NDArray[Any] | None]:
        """[S] the KL of each sample; all None without --kl-coef."""
        return self.kl if self.kl is not None else (None,) * len(self.masks)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The output of an estimator: one float64 array [R] per sample."""

    advantages: Arrays
    """Zero where masked."""
    returns: Arrays | None = None
    """The returns that the critic learns to predict, zero where masked; None without a critic."""


class AdvantageEstimator(ABC):
    """Turns rewards into advantages. The class attributes describe the estimator to the rest of slime."""

    name: ClassVar[str]
    default_policy_loss: ClassVar[str] = "ppo_clip"
    """The default of --policy-loss with this estimator."""
    needs_critic: ClassVar[bool] = False
    """Whether a value model is trained along with the policy; see `CriticEstimator`."""
    whitens: ClassVar[bool] = False
    """The default of --normalize-advantages: whether advantages are whitened over the batch."""
    reads_log_probs: ClassVar[bool] = False
    """Whether it reads the policy's log-probs, which then need a forward pass before the update."""
    compares_within_group: ClassVar[bool] = False
    """Whether each answer is compared with the other answers to its prompt, so that a group of one has no effect."""

    @abstractmethod
    def estimate(self, batch: RewardedBatch) -> Estimate:
        """The advantages of a batch, before distillation and whitening. Deterministic: every rank computes the same."""

    def check(self, args: Args) -> str | None:
        """Why the settings cannot work together, checked before the start; None if they can."""
        return None


@dataclass(frozen=True, kw_only=True)
class CriticEstimator(AdvantageEstimator):
    """An estimator that reads a critic's values, together with the critic's loss."""

    needs_critic: ClassVar[bool] = True

    value_clip: float = opt(0.2, gt=0, le=1e9)
    """Range of a value's change per update (PPO)."""

    def value_loss(self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(loss [R], differentiable in `values`; 1.0 where the clip determined it [R]); both zero where masked."""
        from slime.algorithms.token_losses import value_loss

        return value_loss(values, old_values, returns, mask, value_clip=self.value_clip)


ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    flag="--advantage-estimator",
    package="slime.algorithms.advantages",
    contract=AdvantageEstimator,
)


def where_trained(values: Sequence[npt.NDArray[Any]], masks: Arrays) -> Arrays:
    """`values` with zeros at masked positions, where returns may be non-zero."""
    return tuple(np.where(m > 0, v, 0.0) for v, m in zip(values, masks, strict=True))
