"""Supervised loss: the negative log-prob of each trained token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def negative_log_likelihood(log_probs: Tensor, mask: Tensor) -> Tensor:
    """-log_probs [T], zero (with zero gradient) where masked, whatever stands there."""
    import torch

    return torch.where(mask > 0, -log_probs, torch.zeros_like(log_probs))
