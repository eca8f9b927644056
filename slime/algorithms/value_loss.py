"""The clipped value loss of PPO (Schulman et al. 2017, arXiv:1707.06347, in the form of OpenAI baselines), without 1/2.

The larger of the squared errors of the value and of the value held within `value_clip` of the old one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.algorithms.log_ratio import unmasked

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float
) -> tuple[Tensor, Tensor]:
    """(loss [R], differentiable in `values`; 1.0 where the clip decided it [R]); both zero where masked."""
    import torch

    value, old, target = unmasked(values, mask), unmasked(old_values.detach(), mask), unmasked(returns.detach(), mask)
    plain = (value - target).square()
    bounded = (old + (value - old).clamp(-value_clip, value_clip) - target).square()
    # Inside the clip the two differ by rounding alone.
    decided = (bounded > plain) & ((value - old).abs() > value_clip)
    return torch.maximum(plain, bounded), decided.to(values.dtype)
