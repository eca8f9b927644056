"""Advantages from the rewards of a whole batch, normalised within the samples of one prompt.

GRPO (Shao et al. 2024, DeepSeekMath); without the division by the standard deviation it is the form of Dr. GRPO (Liu et
al. 2025). The REINFORCE++ baseline (Hu 2025) subtracts the group mean and then whitens over all trained tokens.

Invariants
1. Groups are formed by `group_index`, never by position.
2. An execution counts once in its group's statistics, with the mean reward of its samples (fan-out siblings).
3. A group of one, and a group whose rewards are all equal, have advantage exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

STD_EPSILON = 1e-6
"""Added to the (unbiased) standard deviation."""
WHITEN_EPSILON = 1e-8

Array = npt.NDArray[np.float64]


def group_advantages(
    rewards_S: Sequence[float], group_index_S: Sequence[int], execution_S: Sequence[int], *, normalize_std: bool
) -> Array:
    """Reward minus group mean for each sample [S], over the group's standard deviation if `normalize_std`."""
    rewards = np.asarray(rewards_S, np.float64)
    groups, executions = np.asarray(group_index_S), np.asarray(execution_S)
    assert rewards.shape == groups.shape == executions.shape, f"{rewards.shape}, {groups.shape}, {executions.shape}"
    out = np.zeros_like(rewards)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        own = [rewards[members[executions[members] == e]].mean() for e in np.unique(executions[members])]
        values = rewards[members]
        if len(own) < 2 or np.ptp(values) == 0:
            continue  # no comparison, no signal; computed it could be 1e-17 / 1e-6
        advantage = values - np.mean(own)
        out[members] = advantage / (np.std(own, ddof=1) + STD_EPSILON) if normalize_std else advantage
    return out


def whiten(advantages_S: Array, num_trained_tokens_S: Sequence[int]) -> Array:
    """Zero mean and unit variance over all trained tokens; [S], an advantage holds for all tokens of its sample."""
    counts = np.asarray(num_trained_tokens_S, np.float64)
    total = counts.sum()
    if total < 2:
        return np.zeros_like(advantages_S)
    mean = (advantages_S * counts).sum() / total
    variance = (np.square(advantages_S - mean) * counts).sum() / (total - 1)
    whitened: Array = (advantages_S - mean) / np.sqrt(variance + WHITEN_EPSILON)
    return whitened
