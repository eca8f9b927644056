"""Truncated importance sampling between engine and trainer (Espeholt et al. 2018; Yao et al. 2025, "off-policy RL").

Tokens are sampled by an inference engine whose probabilities differ from the trainer's by rounding, precision or age.
The policy gradient is multiplied by w = clamp(p_trainer_old / p_engine, low, high), without a gradient of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.log_ratio import clamped_log_ratio


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Per-token results [T]; weight 1 where masked."""

    weight: Tensor
    """After truncation; detached."""
    raw: Tensor
    """Before truncation; detached."""
    truncated: Tensor
    """1.0 where the truncation changed the weight."""


def truncated_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, clip: float, clip_low: float
) -> ImportanceWeights:
    """exp(old - rollout) truncated to [clip_low, clip]. Values at masked positions cannot matter."""
    log_ratio, _ = clamped_log_ratio(old_log_probs.detach(), rollout_log_probs.detach(), mask)
    raw = log_ratio.exp()
    weight = raw.clamp(clip_low, clip)
    keep = mask > 0
    one = torch.ones_like(raw)
    return ImportanceWeights(torch.where(keep, weight, one), raw, ((weight != raw) & keep).float())
