"""CISPO (MiniMax-M1, arXiv:2506.13585): the importance weight is clipped, the gradient of no token is cut off.

loss = -sg(clip(r, clip_low, clip_high)) * A * log policy. Only its gradient means something: its value scales with the
log-prob.
"""

from __future__ import annotations

from torch import Tensor

from slime.algorithms.log_ratio import LOG_RATIO_LIMIT, clamped_log_ratio, unmasked
from slime.algorithms.policy.outcome import PolicyLoss


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None,
    clip_high: float,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> PolicyLoss:
    """Loss [R]. `clip_low` (None: no floor) and `clip_high` bound the ratio itself, they are no distances from 1."""
    log_ratio, limited = clamped_log_ratio(log_probs.detach(), old_log_probs.detach(), mask, log_ratio_limit)
    ratio = log_ratio.exp()
    weight = ratio.clamp(clip_low, clip_high)
    loss = -weight * unmasked(advantages.detach(), mask) * unmasked(log_probs, mask)
    clipped = (weight != ratio) & (mask > 0)
    return PolicyLoss(loss, clipped.to(loss.dtype), -log_ratio, limited.to(loss.dtype))
