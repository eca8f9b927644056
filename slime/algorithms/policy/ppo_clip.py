"""The clipped policy loss (Schulman et al. 2017, PPO, arXiv:1707.06347), with the two refinements of `clip`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.log_ratio import LOG_RATIO_LIMIT, clamped_log_ratio, unmasked
from slime.algorithms.policy import POLICY_LOSSES, PolicyLoss, PolicyTokens, TokenLosses
from slime.algorithms.policy.clip import ClipSettings, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor


@POLICY_LOSSES.register("ppo_clip")
@dataclass(frozen=True, kw_only=True)
class ClippedPolicyLoss(ClipSettings, PolicyLoss):
    """The ratio of each token is held near 1."""

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        """See `PolicyLoss`."""
        return clipped_policy_loss(
            tokens.log_probs,
            tokens.old_log_probs,
            tokens.advantages,
            tokens.mask,
            eps_clip=self.eps_clip,
            eps_clip_high=self.eps_clip_high,
            eps_clip_c=self.eps_clip_c,
            log_ratio_limit=tokens.log_ratio_limit,
        )


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> TokenLosses:
    """max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A), then the dual clip if `eps_clip_c` (> 1) is given.

    log_probs, old_log_probs, advantages, mask: [R]. Only `log_probs` gets a gradient.
    """
    log_ratio, limited = clamped_log_ratio(log_probs, old_log_probs.detach(), mask, log_ratio_limit)
    loss, clipped = clipped_surrogate(
        log_ratio.exp(), unmasked(advantages.detach(), mask), eps_clip, eps_clip_high, eps_clip_c
    )
    return TokenLosses(loss, clipped, -log_ratio.detach(), limited.to(loss.dtype))
