"""Policy losses per token, before aggregation.

To add a loss, derive a frozen dataclass from `PolicyLoss`, whose fields are its settings, and register it. To use your
own loss, pass its import path: `--policy-loss my_pkg.mine`.
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
    """The columns of a micro-batch with R response tokens that a policy loss reads. Masked values may be anything."""

    log_probs: Tensor
    """[R] log-probs under the current policy; the only input with a gradient."""
    old_log_probs: Tensor
    """[R] log-probs under the policy before the update."""
    advantages: Tensor
    """[R] advantage of each token."""
    mask: Tensor
    """[R] 1.0 where the token is trained."""
    sequences: Sequences
    log_ratio_limit: float = LOG_RATIO_LIMIT
    """Limit to whose +- log-ratios are clamped; 0: no clamp."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The result of a policy loss per token [R], in the dtype of the log-probs, zero where masked."""

    loss: Tensor
    """Differentiable in the log-probs."""
    clipped: Tensor
    """1.0 where a clip acted: no gradient (PPO, GSPO) or a bounded weight (CISPO). Never set by SAPO's soft gate."""
    old_minus_new: Tensor
    """Detached log-prob difference; its mean is the public metric `ppo_kl`."""
    ratio_limited: Tensor
    """1.0 where the log-ratio was clamped."""


class PolicyLoss(ABC):
    name: ClassVar[str]

    @abstractmethod
    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """Returns the loss of each token. It must not depend on masked values, even NaN."""

    def check(self, args: Args) -> str | None:
        """Returns an error message if these settings contradict each other, else None. Called before the run starts."""
        return None


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss", flag="--policy-loss", package="slime.algorithms.policy_loss", contract=PolicyLoss
)
