"""Advantages and returns, NumPy float64 on the host, from the whole batch.

One file per estimator: derive a frozen dataclass from `AdvantageEstimator` (or `GroupEstimator` of `groups`), whose
fields are its settings, and register it. A user's own is named by its path: `--advantage-estimator my_pkg.mine`. The
formulas that several share stand beside them: `groups`, `returns`, `scan`; what acts on the advantages of any
estimator, too: `distillation`, `whitening`.
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
"""One array [R] per sample of the batch, R its number of response tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedBatch:
    """All that an estimator reads of a batch of S samples, in the batch's order; the same on every rank."""

    rewards: Array
    """[S] raw rewards; NaN for an unscored sample, which has advantage 0 and enters no statistic."""
    groups: npt.NDArray[np.int64]
    """[S] prompt id: the samples of one prompt share it, wherever they stand."""
    executions: npt.NDArray[np.int64]
    """[S] execution id; fan-out siblings share it and count once."""
    masks: Arrays
    """[R] 1.0 where trained, zero throughout an unscored sample."""
    log_probs: Arrays | None = None
    """[R] of the policy before the update, of the whole distribution; None unless the estimator
    `reads_log_probs` or a setting needs them."""
    ref_log_probs: Arrays | None = None
    """[R] of the reference; None without one."""
    kl: Arrays | None = None
    """[R] estimate of the KL to the reference; None without --kl-coef."""
    kl_coef: float = 0.0
    """Weight of the KL in the reward. Every estimator applies it."""
    values: Arrays | None = None
    """[R] of the critic before its update; None unless the estimator `needs_critic`."""

    @property
    def kl_S(self) -> Sequence[npt.NDArray[Any] | None]:
        """The KL of each sample, or None of each."""
        return self.kl if self.kl is not None else (None,) * len(self.masks)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an estimator makes of a batch, per sample [R] float64."""

    advantages: Arrays
    """Zero where masked."""
    returns: Arrays | None = None
    """What the critic learns to predict, zero where masked; None without a critic."""


class AdvantageEstimator(ABC):
    """From rewards to advantages. Class attributes tell the rest of slime what it has to know about an estimator."""

    name: ClassVar[str]
    default_policy_loss: ClassVar[str] = "ppo_clip"
    """The policy loss that goes with it unless --policy-loss says otherwise."""
    needs_critic: ClassVar[bool] = False
    """Whether a value model is trained beside the policy; see `CriticEstimator`."""
    whitens: ClassVar[bool] = False
    """Whether advantages are whitened over the batch unless --normalize-advantages says otherwise."""
    reads_log_probs: ClassVar[bool] = False
    """Whether it reads the policy's log-probs, which then come from a forward pass before the update."""
    compares_within_group: ClassVar[bool] = False
    """Whether an answer is compared with the others to its prompt, so that a group of one teaches nothing."""

    @abstractmethod
    def estimate(self, batch: RewardedBatch) -> Estimate:
        """The advantages of a batch, before distillation and whitening. Deterministic: every rank computes the same."""

    def check(self, args: Args) -> str | None:
        """What cannot work together (got / because / do), before anything starts; None if nothing."""
        return None


@dataclass(frozen=True, kw_only=True)
class CriticEstimator(AdvantageEstimator):
    """An estimator that reads a critic's values, and what that critic learns."""

    needs_critic: ClassVar[bool] = True

    value_clip: float = opt(0.2, gt=0, le=1e9)
    """Range of a value's change per update (PPO)."""

    def value_loss(self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(loss [R], differentiable in `values`; 1.0 where a clip decided it [R]); both zero where masked."""
        from slime.algorithms.token_losses import value_loss

        return value_loss(values, old_values, returns, mask, value_clip=self.value_clip)


ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    flag="--advantage-estimator",
    package="slime.algorithms.advantages",
    contract=AdvantageEstimator,
)


def where_trained(values: Sequence[npt.NDArray[Any]], masks: Arrays) -> Arrays:
    """Zero at masked positions, where a return that counts observations is a number, too."""
    return tuple(np.where(m > 0, v, 0.0) for v, m in zip(values, masks, strict=True))
