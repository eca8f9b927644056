"""A toy: A = scale * (R - median of the group). The median is no baseline to recommend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import ESTIMATORS, Array
from slime.algorithms.advantages.grpo import GroupEstimator, iter_groups
from slime.settings.fields import opt


@ESTIMATORS.register("median")
@dataclass(frozen=True, kw_only=True)
class Median(GroupEstimator):
    """Half of a group is better than its baseline."""

    median_scale: float = opt(1.0, gt=0)
    """What advantages over the group's median are multiplied by."""

    def compared(self, rewards: Array, groups: npt.NDArray[np.int64], executions: npt.NDArray[np.int64]) -> Array:
        """See `GroupEstimator`."""
        out = np.zeros_like(rewards)
        for members, _, own in iter_groups(rewards, groups, executions):
            out[members] = self.median_scale * (rewards[members] - np.median(own))
        return out
