"""Per-token policy losses before aggregation. They differ in how they bound the update.

To add one, derive a frozen dataclass from `PolicyLoss` and register it; its fields are its settings. A user's own is
selected by its path: `--policy-loss my_pkg.mine`.
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
    """The input of a policy loss: a micro-batch with R response tokens. Masked values may be arbitrary."""

    log_probs: Tensor
    """[R] log-probs under the current policy; the only input with a gradient."""
    old_log_probs: Tensor
    """[R] log-probs under the policy before the update."""
    advantages: Tensor
    """[R] advantage of each token."""
    mask: Tensor
    """[R] 1.0 where the token is trained."""
    sequences: Sequences
    """Maps tokens to samples."""
    log_ratio_limit: float = LOG_RATIO_LIMIT
    """Log-ratios are clamped to +- this value; 0 means no clamp."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The output of a policy loss: per-token results [R] in the dtype of the log-probs, zero where masked."""

    loss: Tensor
    """Differentiable only in the log-probs."""
    clipped: Tensor
    """1.0 where a clip acted: no gradient (PPO, GSPO) or a bounded weight (CISPO). Never set by SAPO's soft gate."""
    old_minus_new: Tensor
    """Detached difference of log-probs; its mean is the public metric `ppo_kl`."""
    ratio_limited: Tensor
    """1.0 where the log-ratio was clamped."""


class PolicyLoss(ABC):
    """Turns log-probs and advantages into a loss per token."""

    name: ClassVar[str]

    @abstractmethod
    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """The loss of each token. It must not depend on values at masked positions, NaN included."""

    def check(self, args: Args) -> str | None:
        """Why the settings cannot work together, checked before the start; None if they can."""
        return None


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss", flag="--policy-loss", package="slime.algorithms.policy", contract=PolicyLoss
)
