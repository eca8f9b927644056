"""Importance weights between engine and trainer: truncated (TIS; Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training") or masked (icepop, MIS; Ling team 2025, arXiv:2510.18855).

Tokens are sampled by an inference engine whose probabilities differ from the trainer's by rounding, precision or age.
The policy gradient is multiplied by w = p_trainer_old / p_engine, held in [low, high] ("truncate") or replaced by 0
outside of it ("mask"), without a gradient of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime.algorithms.log_ratio import LOG_RATIO_LIMIT
from slime.algorithms.off_policy.levels import mismatch_log_ratio
from slime.algorithms.sequences import Sequences
from slime.core.errors import ConfigError

MODES = ("truncate", "mask")


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Per-token results [R], detached."""

    weight: Tensor
    """What multiplies the policy loss; 1 where masked."""
    raw: Tensor
    """The ratio at its level before truncation or masking; 1 where masked."""
    truncated: Tensor
    """1.0 where the bounds changed the weight."""
    ratio_limited: Tensor
    """1.0 where the log-ratio of the token or the sum of its sequence hit its clamp."""


def importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    sequences: Sequences,
    *,
    level: str = "token",
    mode: str = "truncate",
    low: float,
    high: float,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> ImportanceWeights:
    """exp(old - rollout) at `level`, bounded to [low, high] by `mode`. All inputs [R]; masked values cannot matter.

    What is masked does not enter the product or the mean of its sequence. Raises `ConfigError` on an unknown level or
    mode.
    """
    log_ratio, limited = mismatch_log_ratio(old_log_probs, rollout_log_probs, mask, sequences, level, log_ratio_limit)
    raw = log_ratio.exp()
    outside = ((raw < low) | (raw > high)) & (mask > 0)
    if mode == "truncate":
        weight = torch.where(outside, raw.clamp(low, high), raw)
    elif mode == "mask":
        weight = torch.where(outside, torch.zeros_like(raw), raw)
    else:
        raise ConfigError(f"got --tis-mode {mode!r}; choose one of {', '.join(MODES)}")
    return ImportanceWeights(weight, raw, outside.to(raw.dtype), limited.to(raw.dtype))
