"""Rewards of a whole batch, compared within the samples of one prompt: what those estimators share.

Invariants
1. Groups are formed by `group_index`, never by position.
2. An execution counts once in the statistics, with the mean reward of its samples (fan-out siblings).
3. A group of one, and a group whose executions have equal rewards, have advantage exactly 0.
4. A reward of NaN means unscored: it enters no statistics, and its sample has advantage 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import AdvantageEstimator, Array, Estimate, RewardedBatch
from slime.algorithms.advantages.returns import spread_advantage
from slime.settings.conditions import OWN_ADVANTAGES
from slime.settings.fields import always, derived

if TYPE_CHECKING:
    from slime.settings import Args

EQUAL_TOLERANCE = 1e-12
"""Rewards this close, relative to the largest, are equal: the mean of siblings rounds, and 1e-17 / 1e-6 is noise."""


def _hook_of_rewards(s: Any) -> str | None:
    """The hook whose rewards are trained as they are."""
    names = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")
    return next((f"--{name.replace('_', '-')}" for name in names if getattr(s, name) is not None), None)


@dataclass(frozen=True, kw_only=True)
class GroupEstimator(AdvantageEstimator):
    """One advantage per sample, from the rewards of its group; the KL to the reference is subtracted at each token."""

    compares_within_group: ClassVar[bool] = True

    rewards_normalization: bool = derived(
        lambda s: _hook_of_rewards(s) is None,
        lambda s: (
            f"{hook} returns the rewards to train on"
            if (hook := _hook_of_rewards(s))
            else "rewards are compared within a group"
        ),
        off_names=("--disable-rewards-normalization",),
        needs=OWN_ADVANTAGES,
        asks=always,
    )
    """Subtract the group's mean reward. Off with --custom-reward-post-process-path and
    --custom-convert-samples-to-train-data-path, whose rewards are trained as they are."""

    @abstractmethod
    def compared(self, rewards: Array, groups: npt.NDArray[np.int64], executions: npt.NDArray[np.int64]) -> Array:
        """Rewards [S] less what they are compared with; 0 where there is nothing to compare."""

    def check(self, args: Args) -> str | None:
        """What the reward hook returns is what is trained on."""
        if not (args.custom_reward_post_process_path and self.rewards_normalization):
            return None
        return (
            "got --custom-reward-post-process-path with --rewards-normalization, which would normalise what the hook "
            "returns once more; drop the switch and normalise in the hook"
        )

    def estimate(self, batch: RewardedBatch) -> Estimate:
        """See `AdvantageEstimator`."""
        if self.rewards_normalization:
            scores = self.compared(batch.rewards, batch.groups, batch.executions)
        else:
            scores = np.nan_to_num(batch.rewards, nan=0.0)
        parts = zip(scores, batch.masks, batch.kl_S, strict=True)
        return Estimate(tuple(spread_advantage(score, mask, kl, batch.kl_coef) for score, mask, kl in parts))


def iter_groups(
    rewards: Array,
    group_index_S: Sequence[int] | npt.NDArray[np.int64],
    execution_S: Sequence[int] | npt.NDArray[np.int64],
) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Array]]:
    """For each group: its scored samples, the execution of each (position in the next), reward of each execution."""
    groups, executions = np.asarray(group_index_S), np.asarray(execution_S)
    assert rewards.shape == groups.shape == executions.shape, f"{rewards.shape}, {groups.shape}, {executions.shape}"
    scored = ~np.isnan(rewards)
    for group in np.unique(groups[scored]):
        members = np.flatnonzero((groups == group) & scored)
        _, which = np.unique(executions[members], return_inverse=True)
        yield members, which, np.bincount(which, weights=rewards[members]) / np.bincount(which)


def nothing_to_compare(own: Array) -> bool:
    """Whether a group is of one execution, or all of its executions have the same reward."""
    return len(own) < 2 or bool(np.ptp(own) <= EQUAL_TOLERANCE * np.abs(own).max())
