"""RLOO (Ahmadian et al. 2024, arXiv:2402.14740): A = R - mean of the others = G / (G - 1) * (R - mean)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import ESTIMATORS, Array
from slime.algorithms.advantages.groups import GroupEstimator, iter_groups, nothing_to_compare


@ESTIMATORS.register("rloo")
@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(GroupEstimator):
    """A baseline that does not contain the reward itself, so it adds no bias."""

    def compared(self, rewards: Array, groups: npt.NDArray[np.int64], executions: npt.NDArray[np.int64]) -> Array:
        """See `GroupEstimator`."""
        return leave_one_out(rewards, groups, executions)


def leave_one_out(
    rewards_S: Sequence[float] | Array,
    group_index_S: Sequence[int] | npt.NDArray[np.int64],
    execution_S: Sequence[int] | npt.NDArray[np.int64],
) -> Array:
    """Reward minus the mean of the other executions of its group, for each sample [S]; 0 if there are none."""
    rewards = np.asarray(rewards_S, np.float64)
    out = np.zeros_like(rewards)
    for members, which, own in iter_groups(rewards, group_index_S, execution_S):
        if not nothing_to_compare(own):
            out[members] = rewards[members] - (own.sum() - own[which]) / (len(own) - 1)
    return out
