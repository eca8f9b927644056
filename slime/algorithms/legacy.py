"""Former signatures, for callers that are moved to the new ones in the next change; then this file goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slime.algorithms import aggregation
from slime.algorithms.advantages import groups, whitening
from slime.algorithms.off_policy.importance import ImportanceWeights, importance_weights
from slime.algorithms.sequences import Sequences


def group_advantages(
    rewards_S: Sequence[float], group_index_S: Sequence[int], execution_S: Sequence[int], *, normalize_std: bool
) -> groups.Array:
    """`groups.group_advantages` with a flag in place of the scale."""
    scale = "group" if normalize_std else "none"
    return groups.group_advantages(rewards_S, group_index_S, execution_S, scale=scale)


def whiten(advantages_S: groups.Array, num_trained_tokens_S: Sequence[int]) -> groups.Array:
    """`whitening.whiten` of one advantage per sample; [S]."""
    masks = [np.ones(max(1, n)) * (n > 0) for n in num_trained_tokens_S]
    parts = whitening.whiten([np.full(len(m), a) for a, m in zip(advantages_S, masks, strict=True)], masks)
    return np.asarray([part[0] for part in parts])


def token_weights(
    mask_S: Sequence[npt.NDArray[Any]], execution_S: Sequence[int], *, per_token: bool
) -> list[npt.NDArray[np.float32]]:
    """`aggregation.token_weights` in float32."""
    kind = "token_mean" if per_token else "sequence_mean"
    return [w.astype(np.float32) for w in aggregation.token_weights(mask_S, execution_S, kind=kind)]


def truncated_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, clip: float, clip_low: float
) -> ImportanceWeights:
    """`importance_weights` of tokens."""
    sequences = Sequences(torch.zeros_like(mask, dtype=torch.int64), 1)
    return importance_weights(old_log_probs, rollout_log_probs, mask, sequences, low=clip_low, high=clip)
