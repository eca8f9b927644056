"""The REINFORCE++ baseline (Hu 2025, arXiv:2501.03262): A = R - mean of the group, at every token; then whitened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import ESTIMATORS, Array
from slime.algorithms.advantages.groups import GroupEstimator
from slime.algorithms.advantages.grpo import group_advantages


@ESTIMATORS.register("reinforce_plus_plus_baseline")
@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaseline(GroupEstimator):
    """Centred within the group, scaled over the batch."""

    whitens: ClassVar[bool] = True

    def compared(self, rewards: Array, groups: npt.NDArray[np.int64], executions: npt.NDArray[np.int64]) -> Array:
        """See `GroupEstimator`."""
        return group_advantages(rewards, groups, executions, scale="none")
