"""The clipped policy loss (Schulman et al. 2017, PPO), with two refinements.

Clip-higher (Yu et al. 2025, DAPO): separate bounds below and above 1. Dual clip (Ye et al. 2020): for negative
advantages the loss is at most -c * A, so a large ratio cannot dominate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.log_ratio import clamped_log_ratio


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Per-token results, each [T] float32 and zero where masked."""

    loss: Tensor
    """Differentiable."""
    clipped: Tensor
    """1.0 where a clip decided the loss, so the token has no gradient."""
    old_minus_new: Tensor
    """Detached log-prob difference; its mean is the public metric `ppo_kl`."""
    ratio_limited: Tensor
    """1.0 where the log-ratio hit its clamp."""


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A), then the dual clip if `eps_clip_c` (> 1) is given.

    log_probs, old_log_probs, advantages, mask: [T]. Only `log_probs` gets a gradient.
    """
    keep = mask > 0
    log_ratio, limited = clamped_log_ratio(log_probs, old_log_probs.detach(), mask)
    ratio = log_ratio.exp()
    advantages = torch.where(keep, advantages, torch.zeros_like(advantages))
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
    zero = torch.zeros_like(loss)
    return PolicyLoss(
        loss=torch.where(keep, loss, zero),
        clipped=(clipped & keep).float(),
        old_minus_new=-log_ratio.detach(),
        ratio_limited=(limited & keep).float(),
    )
