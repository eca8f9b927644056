"""Per-token policy losses, before aggregation.

To add a loss, derive a frozen dataclass from `PolicyLoss` and register it. Its fields become settings. Your own loss is
selected by its import path, `--policy-loss my_pkg.mine`.
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
    """A policy loss's input for a micro-batch with R response tokens. Masked entries are arbitrary, even NaN."""

    log_probs: Tensor
    """[R] log-probs under the current policy. The only input with a gradient."""
    old_log_probs: Tensor
    """[R] log-probs under the policy before the update."""
    advantages: Tensor
    """[R] advantage of each token."""
    mask: Tensor
    """[R] 1.0 where the token is trained."""
    sequences: Sequences
    log_ratio_limit: float = LOG_RATIO_LIMIT
    """Log-ratios are clamped to +- this limit; 0 disables the clamp."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The per-token output of a policy loss [R], in the dtype of the log-probs, zero where masked."""

    loss: Tensor
    """The loss; differentiable in the log-probs."""
    clipped: Tensor
    """1.0 where a token was clipped: no gradient (PPO, GSPO) or a bounded weight (CISPO). Always 0 for SAPO."""
    old_minus_new: Tensor
    """Detached log-prob difference. Its mean is the public metric `ppo_kl`."""
    ratio_limited: Tensor
    """1.0 where the log-ratio was clamped."""


class PolicyLoss(ABC):
    name: ClassVar[str]

    @abstractmethod
    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """Computes the loss of each token. The result must not depend on masked entries, even if they are NaN."""

    def check(self, args: Args) -> str | None:
        """Returns an error message if the settings conflict, else None. Called before the run starts."""
        return None


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss", flag="--policy-loss", package="slime.algorithms.policy_loss", contract=PolicyLoss
)
