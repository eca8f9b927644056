"""Advantages from the rewards of a whole batch, compared within the samples of one prompt.

GRPO (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300); without the division by the standard deviation it is the form
of Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), and what the REINFORCE++ baseline (Hu 2025, arXiv:2501.03262) whitens.
RLOO (Ahmadian et al. 2024, arXiv:2402.14740) compares with the mean of the others.

Invariants
1. Groups are formed by `group_index`, never by position.
2. An execution counts once in the statistics, with the mean reward of its samples (fan-out siblings).
3. A group of one, and a group whose executions have equal rewards, have advantage exactly 0.
4. A reward of NaN means unscored: it enters no statistics, and its sample has advantage 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from slime.core.errors import ConfigError

STD_EPSILON = 1e-6
"""Added to the (unbiased) standard deviation."""
EQUAL_TOLERANCE = 1e-12
"""Rewards this close, relative to the largest, are equal: the mean of siblings rounds, and 1e-17 / 1e-6 is noise."""
SCALES = ("group", "batch", "none")

Array = npt.NDArray[np.float64]


def group_advantages(
    rewards_S: Sequence[float] | Array,
    group_index_S: Sequence[int],
    execution_S: Sequence[int],
    *,
    scale: str = "group",
    epsilon: float = STD_EPSILON,
) -> Array:
    """Reward minus the mean of its group, for each sample [S], divided as `scale` says.

    group: by the group's standard deviation + epsilon; batch: by that of all executions of the batch; none: not.
    Raises `ConfigError` on an unknown scale.
    """
    if scale not in SCALES:
        raise ConfigError(f"got --advantage-scale {scale!r}; choose one of {', '.join(SCALES)}")
    rewards = np.asarray(rewards_S, np.float64)
    out = np.zeros_like(rewards)
    everyone: list[float] = []
    for members, _, own in _groups(rewards, group_index_S, execution_S):
        everyone.extend(own)
        if _no_comparison(own):
            continue
        out[members] = rewards[members] - np.mean(own)
        if scale == "group":
            out[members] /= np.std(own, ddof=1) + epsilon
    if scale == "batch" and len(everyone) > 1:
        out /= np.std(everyone, ddof=1) + epsilon
    return out


def leave_one_out(
    rewards_S: Sequence[float] | Array, group_index_S: Sequence[int], execution_S: Sequence[int]
) -> Array:
    """Reward minus the mean of the other executions of its group, for each sample [S]; 0 if there are none."""
    rewards = np.asarray(rewards_S, np.float64)
    out = np.zeros_like(rewards)
    for members, which, own in _groups(rewards, group_index_S, execution_S):
        if not _no_comparison(own):
            out[members] = rewards[members] - (own.sum() - own[which]) / (len(own) - 1)
    return out


def _groups(
    rewards: Array, group_index_S: Sequence[int], execution_S: Sequence[int]
) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Array]]:
    """For each group: its scored samples, the execution of each (position in the next), reward of each execution."""
    groups, executions = np.asarray(group_index_S), np.asarray(execution_S)
    assert rewards.shape == groups.shape == executions.shape, f"{rewards.shape}, {groups.shape}, {executions.shape}"
    scored = ~np.isnan(rewards)
    for group in np.unique(groups[scored]):
        members = np.flatnonzero((groups == group) & scored)
        _, which = np.unique(executions[members], return_inverse=True)
        yield members, which, np.bincount(which, weights=rewards[members]) / np.bincount(which)


def _no_comparison(own: Array) -> bool:
    return len(own) < 2 or bool(np.ptp(own) <= EQUAL_TOLERANCE * np.abs(own).max())
