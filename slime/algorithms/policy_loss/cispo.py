"""CISPO (MiniMax-M1, arXiv:2506.13585): clips the importance weight instead of the loss, so every token has a gradient.

loss = -sg(clip(r, clip_low, clip_high)) * A * log policy. Only the gradient is meaningful; the value scales with the
log-prob.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.algorithms.policy_loss import POLICY_LOSSES, PolicyLoss, PolicyTokens, TokenLosses
from slime.algorithms.policy_loss.ppo_clip import ClipRange
from slime.algorithms.token_losses import LOG_RATIO_LIMIT, clamped_log_ratio, unmasked
from slime.settings.fields import Need, derived, opt
from slime.settings.flags import BOUND

if TYPE_CHECKING:
    from torch import Tensor

    from slime.settings import Args


_OWN_BOUNDS = "policy_loss ppo_clip or gspo, or cispo without its own bounds"


def _has_own_high(s: Any) -> bool:
    return bool(s.was_given("cispo_clip_high"))


@POLICY_LOSSES.register("cispo")
@dataclass(frozen=True, kw_only=True)
class ClippedWeightPolicyLoss(ClipRange, PolicyLoss):
    eps_clip: float = opt(
        0.2,
        gt=0,
        le=1e9,
        needs=Need(
            lambda s: not s.was_given("cispo_clip_low") or (not _has_own_high(s) and not s.was_given("eps_clip_high")),
            _OWN_BOUNDS,
        ),
    )
    """Lower clip range of the probability ratio: 1 - eps_clip (PPO, arXiv:1707.06347); from 1 on, no lower bound."""
    eps_clip_high: float = derived(
        lambda s: s.eps_clip,
        "eps_clip",
        needs=Need(lambda s: not _has_own_high(s), _OWN_BOUNDS),
        gt=0,
        le=1e9,
    )
    """Upper clip range: 1 + eps_clip_high (DAPO, arXiv:2503.14476). Default: eps_clip."""
    cispo_clip_low: float = derived(lambda s: max(0.0, 1.0 - s.eps_clip), "1 - eps_clip", within=BOUND)
    """Lower bound of the CISPO weight itself; 0 for no bound. Default: 1 - eps_clip."""
    cispo_clip_high: float = derived(lambda s: 1.0 + s.eps_clip_high, "1 + eps_clip_high", within=BOUND)
    """Upper bound of the CISPO weight itself. Default: 1 + eps_clip_high."""

    def token_losses(self, tokens: PolicyTokens) -> TokenLosses:
        return cispo_loss(
            tokens.log_probs,
            tokens.old_log_probs,
            tokens.advantages,
            tokens.mask,
            clip_low=self.cispo_clip_low,
            clip_high=self.cispo_clip_high,
            log_ratio_limit=tokens.log_ratio_limit,
        )

    def check(self, args: Args) -> str | None:
        if 0 <= self.cispo_clip_low <= self.cispo_clip_high:
            return None
        return (
            f"--cispo-clip-low {self.cispo_clip_low} and --cispo-clip-high {self.cispo_clip_high} must satisfy "
            "0 <= low <= high"
        )


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None,
    clip_high: float,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> TokenLosses:
    """Computes the loss [R]. `clip_low` (None: no bound) and `clip_high` bound the ratio, not its distance to 1."""
    log_ratio, limited = clamped_log_ratio(log_probs.detach(), old_log_probs.detach(), mask, log_ratio_limit)
    ratio = log_ratio.exp()
    weight = ratio.clamp(clip_low, clip_high)
    loss = -weight * unmasked(advantages.detach(), mask) * unmasked(log_probs, mask)
    clipped = (weight != ratio) & (mask > 0)
    return TokenLosses(loss, clipped.to(loss.dtype), -log_ratio, limited.to(loss.dtype))
