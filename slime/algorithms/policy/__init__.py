"""Policy losses per token, before any aggregation: what bounds the update.

One file per loss: derive a frozen dataclass from `PolicyLoss`, whose fields are its settings, and register it. A user's
own is named by its path: `--policy-loss my_pkg.mine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from slime.algorithms.token_losses import LOG_RATIO_LIMIT
from slime.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.token_losses import Sequences
    from slime.settings import Args


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """All that a policy loss reads of a micro-batch with R response tokens. Masked values cannot be trusted."""

    log_probs: Tensor
    """[R] of the current policy; the only input with a gradient."""
    old_log_probs: Tensor
    """[R] of the policy before the update."""
    advantages: Tensor
    """[R]"""
    mask: Tensor
    """[R] trained tokens."""
    sequences: Sequences
    """Which sample each token belongs to."""
    log_ratio_limit: float = LOG_RATIO_LIMIT
    """Log-ratios are clamped to +- this; 0 switches it off."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """What every policy loss returns: per-token results, each [R], in the dtype of the log-probs, zero where masked."""

    loss: Tensor
    """Differentiable in the log-probs alone."""
    clipped: Tensor
    """1.0 where a clip decided: no gradient (PPO, GSPO), a bounded weight (CISPO); never with SAPO's soft gate."""
    old_minus_new: Tensor
    """Detached log-prob difference of each token; its mean is the public metric `ppo_kl`."""
    ratio_limited: Tensor
    """1.0 where the log-ratio of the token hit its clamp."""


class PolicyLoss(ABC):
    """From log-probs and advantages to a loss per token."""

    name: ClassVar[str]

    @abstractmethod
    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """The loss of each token. It must not depend on what stands at masked positions, NaN included."""

    def check(self, args: Args) -> str | None:
        """What cannot work together (got / because / do), before anything starts; None if nothing."""
        return None


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss", flag="--policy-loss", package="slime.algorithms.policy", contract=PolicyLoss
)
