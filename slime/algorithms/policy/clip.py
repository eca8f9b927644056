"""Clipping of a ratio, as PPO and GSPO share it, with two refinements.

Clip-higher (Yu et al. 2025, DAPO, arXiv:2503.14476): separate bounds below and above 1. Dual clip (Ye et al. 2020,
arXiv:1912.09729): for negative advantages the loss is at most -c * A, so a large ratio cannot dominate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.settings.fields import derived, opt

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ClipRange:
    """The range of a ratio."""

    eps_clip: float = opt(0.2, gt=0, le=1)
    """Lower clip range of the probability ratio: 1 - eps_clip (PPO, arXiv:1707.06347)."""
    eps_clip_high: float = derived(lambda s: s.eps_clip, "eps_clip", gt=0, le=1e9)
    """Upper clip range: 1 + eps_clip_high (DAPO, arXiv:2503.14476). Default: eps_clip."""


@dataclass(frozen=True, kw_only=True)
class ClipSettings(ClipRange):
    """The range of a ratio, and the bound of the dual clip."""

    eps_clip_c: float | None = opt(None, gt=1, le=1e9)
    """Dual clip bound for negative advantages, > 1 (arXiv:1912.09729)."""


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float | None, eps_clip_c: float | None
) -> tuple[Tensor, Tensor]:
    """(loss [R], 1.0 where a clip decided it [R]) of ratios and advantages that are finite at every position."""
    import torch

    high = eps_clip if eps_clip_high is None else eps_clip_high
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - eps_clip, 1.0 + high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if eps_clip_c is not None:
        ceiling = -eps_clip_c * advantages
        above = (advantages < 0) & (loss > ceiling)
        loss = torch.where(above, ceiling, loss)
        clipped = clipped | above
    return loss, clipped.to(loss.dtype)
