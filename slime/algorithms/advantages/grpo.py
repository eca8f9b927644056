"""Estimators that compare the rewards of one prompt's executions: GRPO with or without the standard deviation, RLOO,
and GSPO, CISPO and SAPO, which use GRPO's advantages.

Invariants
1. Groups are formed by `group_index`, never by position.
2. An execution counts once in the statistics, with the mean reward of its samples (fan-out siblings).
3. A group of one, and a group whose executions have equal rewards, have advantage exactly 0.
4. A reward of NaN means unscored: no statistic includes it, and its sample has advantage 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, assert_never

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import ESTIMATORS, AdvantageEstimator, Array, Estimate, RewardedBatch
from slime.algorithms.advantages.returns import spread_advantage
from slime.settings.conditions import OWN_ADVANTAGES
from slime.settings.fields import Need, always, derived, opt

if TYPE_CHECKING:
    from slime.settings import Args

EQUAL_TOLERANCE = 1e-12
"""Relative tolerance for equal rewards. The mean over siblings has rounding errors, and dividing them by a tiny
standard deviation would amplify noise."""


def _hook_of_rewards(s: Any) -> str | None:
    """Returns the flag of the given hook whose rewards are used without normalisation, or None."""
    names = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")
    return next((f"--{name.replace('_', '-')}" for name in names if getattr(s, name) is not None), None)


@dataclass(frozen=True, kw_only=True)
class GroupEstimator(AdvantageEstimator):
    """One advantage per sample, from the rewards of its group, minus the KL to the reference at each token."""

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
    --custom-convert-samples-to-train-data-path, whose rewards are used unchanged."""

    @abstractmethod
    def compared(self, rewards: Array, groups: npt.NDArray[np.int64], executions: npt.NDArray[np.int64]) -> Array:
        """Rewards [S] minus their baseline; 0 if there is nothing to compare."""

    def check(self, args: Args) -> str | None:
        if not (args.custom_reward_post_process_path and self.rewards_normalization):
            return None
        return (
            "--rewards-normalization would normalise the rewards of --custom-reward-post-process-path again; drop the "
            "switch and normalise in the hook"
        )

    def estimate(self, batch: RewardedBatch) -> Estimate:
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
    """Yields for each group: (positions of its scored samples, index of each sample's execution, reward per
    execution)."""
    groups, executions = np.asarray(group_index_S), np.asarray(execution_S)
    assert rewards.shape == groups.shape == executions.shape, f"{rewards.shape}, {groups.shape}, {executions.shape}"
    scored = ~np.isnan(rewards)
    for group in np.unique(groups[scored]):
        members = np.flatnonzero((groups == group) & scored)
        _, which = np.unique(executions[members], return_inverse=True)
        yield members, which, np.bincount(which, weights=rewards[members]) / np.bincount(which)


def nothing_to_compare(own: Array) -> bool:
    """Returns whether a group has one execution, or equal rewards."""
    return len(own) < 2 or bool(np.ptp(own) <= EQUAL_TOLERANCE * np.abs(own).max())


STD_EPSILON = 1e-6
"""Added to the (unbiased) standard deviation."""
Scale = Literal["group", "batch", "none"]
"""Which samples the standard deviation is computed over."""

_COMPARES = (OWN_ADVANTAGES, Need(lambda s: s.rewards_normalization, "rewards_normalization"))


@ESTIMATORS.register("grpo")
@dataclass(frozen=True, kw_only=True)
class GroupRelative(GroupEstimator):
    """GRPO (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300): A = (R - mean of the group) / (std of the group + eps).

    Without the division it is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
    """

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
    """Which standard deviation divides the rewards of grpo, gspo, cispo and sapo. Default: group, or none with
    --disable-grpo-std-normalization."""
    advantage_epsilon: float = opt(
        STD_EPSILON,
        needs=(*_COMPARES, Need(lambda s: s.advantage_scale != "none", "advantage_scale group or batch")),
        ge=0,
        le=1_000,
    )
    """Added to the standard deviation that divides the rewards."""

    def compared(self, rewards: Array, groups: npt.NDArray[np.int64], executions: npt.NDArray[np.int64]) -> Array:
        return group_advantages(rewards, groups, executions, scale=self.advantage_scale, epsilon=self.advantage_epsilon)

    def check(self, args: Args) -> str | None:
        both = args.was_given("grpo_std_normalization") and args.was_given("advantage_scale")
        if both and self.grpo_std_normalization != (self.advantage_scale != "none"):
            return (
                f"grpo_std_normalization {self.grpo_std_normalization} contradicts advantage_scale "
                f"{self.advantage_scale}; set only one of them"
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
    """Returns each sample's reward minus the mean of its group [S], divided according to `scale`.

    group: by the group's standard deviation + epsilon; batch: by the standard deviation over all executions of the
    batch; none: undivided.
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


@ESTIMATORS.register("gspo")
@dataclass(frozen=True, kw_only=True)
class GspoAdvantages(GroupRelative):
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): GRPO's advantages with a sequence-level policy loss."""

    default_policy_loss: ClassVar[str] = "gspo"


@ESTIMATORS.register("cispo")
@dataclass(frozen=True, kw_only=True)
class CispoAdvantages(GroupRelative):
    """CISPO (MiniMax-M1, arXiv:2506.13585): GRPO's advantages with a policy loss that clips the importance weight."""

    default_policy_loss: ClassVar[str] = "cispo"


@ESTIMATORS.register("sapo")
@dataclass(frozen=True, kw_only=True)
class SapoAdvantages(GroupRelative):
    """SAPO (Gao et al. 2025, arXiv:2511.20347): GRPO's advantages with a soft-gated policy loss."""

    default_policy_loss: ClassVar[str] = "sapo"


@ESTIMATORS.register("rloo")
@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(GroupEstimator):
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): A = R - mean of the other executions = G / (G - 1) * (R - mean).

    The baseline excludes the execution's own reward, so it adds no bias.
    """

    def compared(self, rewards: Array, groups: npt.NDArray[np.int64], executions: npt.NDArray[np.int64]) -> Array:
        return leave_one_out(rewards, groups, executions)


def leave_one_out(
    rewards_S: Sequence[float] | Array,
    group_index_S: Sequence[int] | npt.NDArray[np.int64],
    execution_S: Sequence[int] | npt.NDArray[np.int64],
) -> Array:
    """Returns each reward minus the mean of the group's other executions [S]; 0 if there are no others."""
    rewards = np.asarray(rewards_S, np.float64)
    out = np.zeros_like(rewards)
    for members, which, own in iter_groups(rewards, group_index_S, execution_S):
        if not nothing_to_compare(own):
            out[members] = rewards[members] - (own.sum() - own[which]) / (len(own) - 1)
    return out
