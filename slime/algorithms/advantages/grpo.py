"""GRPO (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300): A = (R - mean of the group) / (std of the group + eps).

Without the division by the standard deviation it is the form of Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, assert_never

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import ESTIMATORS, Array
from slime.algorithms.advantages.groups import GroupEstimator, iter_groups, nothing_to_compare
from slime.settings.conditions import OWN_ADVANTAGES
from slime.settings.fields import Need, always, derived, opt

if TYPE_CHECKING:
    from slime.settings import Args

STD_EPSILON = 1e-6
"""Added to the (unbiased) standard deviation."""
Scale = Literal["group", "batch", "none"]
"""Whose standard deviation divides."""

_COMPARES = (OWN_ADVANTAGES, Need(lambda s: s.rewards_normalization, "rewards_normalization"))


@ESTIMATORS.register("grpo")
@dataclass(frozen=True, kw_only=True)
class GroupRelative(GroupEstimator):
    """Rewards of a group, centred and scaled."""

    grpo_std_normalization: bool = derived(
        lambda s: s.n_samples_per_prompt != 1,
        lambda s: (
            "a group of one sample has no standard deviation"
            if s.n_samples_per_prompt == 1
            else "rewards are divided by the group's standard deviation"
        ),
        off_names=("--disable-grpo-std-normalization",),
        needs=_COMPARES,
        asks=always,
    )
    """Divide group rewards by their standard deviation (off: Dr. GRPO, arXiv:2503.20783)."""
    advantage_scale: Scale = derived(
        lambda s: "group" if s.grpo_std_normalization else "none",
        lambda s: f"grpo_std_normalization {s.grpo_std_normalization}",
        needs=_COMPARES,
    )
    """Whose standard deviation divides the rewards of grpo, gspo, cispo and sapo. Default: group, or none with
    --disable-grpo-std-normalization."""
    advantage_epsilon: float = opt(
        STD_EPSILON,
        needs=(*_COMPARES, Need(lambda s: s.advantage_scale != "none", "advantage_scale group or batch")),
        ge=0,
        le=1_000,
    )
    """Added to that standard deviation."""

    def compared(self, rewards: Array, groups: npt.NDArray[np.int64], executions: npt.NDArray[np.int64]) -> Array:
        """See `GroupEstimator`."""
        return group_advantages(rewards, groups, executions, scale=self.advantage_scale, epsilon=self.advantage_epsilon)

    def check(self, args: Args) -> str | None:
        """Two settings say whether rewards are divided; where both are given they say the same."""
        both = args.was_given("grpo_std_normalization") and args.was_given("advantage_scale")
        if both and self.grpo_std_normalization != (self.advantage_scale != "none"):
            return (
                f"got grpo_std_normalization {self.grpo_std_normalization} with advantage_scale "
                f"{self.advantage_scale}, which contradicts it; give one of them"
            )
        return super().check(args)


def group_advantages(
    rewards_S: Sequence[float] | Array,
    group_index_S: Sequence[int] | npt.NDArray[np.int64],
    execution_S: Sequence[int] | npt.NDArray[np.int64],
    *,
    scale: Scale = "group",
    epsilon: float = STD_EPSILON,
) -> Array:
    """Reward minus the mean of its group, for each sample [S], divided as `scale` says.

    group: by the group's standard deviation + epsilon; batch: by that of all executions of the batch; none: not.
    """
    rewards = np.asarray(rewards_S, np.float64)
    out = np.zeros_like(rewards)
    everyone: list[float] = []
    for members, _, own in iter_groups(rewards, group_index_S, execution_S):
        everyone.extend(own)
        if nothing_to_compare(own):
            continue
        out[members] = rewards[members] - np.mean(own)
        if scale == "group":
            out[members] /= np.std(own, ddof=1) + epsilon
    match scale:
        case "batch":
            return out / (np.std(everyone, ddof=1) + epsilon) if len(everyone) > 1 else out
        case "group" | "none":
            return out
        case _ as never:
            assert_never(never)
