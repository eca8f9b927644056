"""The clipped policy loss (Schulman et al. 2017, PPO, arXiv:1707.06347), with two refinements.

Clip-higher (Yu et al. 2025, DAPO, arXiv:2503.14476): separate bounds below and above 1. Dual clip (Ye et al. 2020,
arXiv:1912.09729): for negative advantages the loss is at most -c * A, so a large ratio cannot dominate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algorithms.log_ratio import LOG_RATIO_LIMIT, clamped_log_ratio, unmasked
from slime.algorithms.policy.outcome import PolicyLoss


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
) -> PolicyLoss:
    """max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A), then the dual clip if `eps_clip_c` (> 1) is given.

    log_probs, old_log_probs, advantages, mask: [R]. Only `log_probs` gets a gradient.
    """
    log_ratio, limited = clamped_log_ratio(log_probs, old_log_probs.detach(), mask, log_ratio_limit)
    loss, clipped = clipped_surrogate(
        log_ratio.exp(), unmasked(advantages.detach(), mask), eps_clip, eps_clip_high, eps_clip_c
    )
    return PolicyLoss(loss, clipped, -log_ratio.detach(), limited.to(loss.dtype))


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float | None, eps_clip_c: float | None
) -> tuple[Tensor, Tensor]:
    """(loss [R], 1.0 where a clip decided it [R]) of ratios and advantages that are finite at every position."""
    high = eps_clip if eps_clip_high is None else eps_clip_high
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - eps_clip, 1.0 + high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if eps_clip_c is not None:
        ceiling = -eps_clip_c * advantages
        cut = (advantages < 0) & (loss > ceiling)
        loss = torch.where(cut, ceiling, loss)
        clipped = clipped | cut
    return loss, clipped.to(loss.dtype)
