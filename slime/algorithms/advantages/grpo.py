"""Estimators that compare rewards within a group: GRPO with or without the standard deviation, for whole responses or
for each turn, RLOO, MaxRL, and GSPO, CISPO and SAPO, which use GRPO's advantages.

Invariants
1. Groups are formed by `group_index`, never by position.
2. Each execution counts once in the statistics, with the mean reward of its samples (fan-out siblings).
3. If a group has a single execution or all its rewards are equal, its advantages are exactly 0.
4. A reward of NaN means unscored. It is excluded from all statistics, and the sample has advantage 0.
5. Rewards at tokens count: responses are compared by `RewardedBatch.totals`, turns by their discounted returns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, assert_never

import numpy as np
import numpy.typing as npt

from slime.algorithms.advantages import (
    ESTIMATORS,
    AdvantageEstimator,
    Array,
    Estimate,
    RewardedBatch,
    Spread,
    is_trained,
    kept,
)
from slime.algorithms.advantages.returns import Discounts, reverse_scan, spread_advantage
from slime.core.errors import DataError
from slime.core.sample import NOT_SAMPLED
from slime.settings.fields import Need, always, derived, opt

if TYPE_CHECKING:
    from slime.settings import Args

EQUAL_TOLERANCE = 1e-12
"""Relative tolerance for equal rewards. Means over siblings have rounding errors, which a division by the resulting
tiny standard deviation would amplify."""


def hook_of_rewards(s: Any) -> str | None:
    """Returns the flag of the hook that computes the final rewards, if one is set, else None."""
    names = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")
    return next((f"--{name.replace('_', '-')}" for name in names if getattr(s, name) is not None), None)


@dataclass(frozen=True, kw_only=True)
class GroupEstimator(AdvantageEstimator):
    """Computes one advantage per sample by comparing rewards within its group, minus the KL penalty at each token."""

    compares_within_group: ClassVar[bool] = True

    rewards_normalization: bool = derived(
        lambda s: hook_of_rewards(s) is None,
        lambda s: (
            f"{hook} returns the final rewards"
            if (hook := hook_of_rewards(s))
            else "rewards are compared within a group"
        ),
        off_names=("--disable-rewards-normalization",),
        asks=always,
    )
    """Subtract the mean reward of the group. Off with --custom-reward-post-process-path or
    --custom-convert-samples-to-train-data-path, which return the final rewards."""

    @abstractmethod
    def compared(self, rewards: Array, groups: npt.NDArray[np.int64], executions: npt.NDArray[np.int64]) -> Array:
        """Returns each reward minus its baseline [S]; 0 if there is nothing to compare."""

    def check(self, args: Args) -> str | None:
        own = not type(self).__module__.startswith("slime.") and type(self).estimate is GroupEstimator.estimate
        if own and not self.rewards_normalization:
            flag = hook_of_rewards(args) or "--disable-rewards-normalization"
            return (
                f"{flag} makes the rewards final, so compared() of advantage_estimator {args.advantage_estimator} "
                "would never be called; drop one of the two"
            )
        if not (args.custom_reward_post_process_path and self.rewards_normalization):
            return None
        return (
            "--rewards-normalization would normalize the rewards from --custom-reward-post-process-path again; drop it "
            "and normalize in the hook"
        )

    def scores(self, batch: RewardedBatch) -> Array:
        if self.rewards_normalization:
            return self.compared(batch.totals, batch.groups, batch.executions)
        return np.nan_to_num(batch.totals, nan=0.0)

    def estimate(self, batch: RewardedBatch) -> Estimate:
        scores = self.scores(batch)
        masks, kl, coef = batch.masks, batch.kl, batch.kl_coef
        if kl is None or not coef:
            return Estimate(Spread(np.asarray(scores, np.float64), masks))
        return Estimate(batch.computed(lambda p: spread_advantage(float(scores[p]), masks[p], kl[p], coef)))


def iter_groups(
    rewards: Array,
    group_index_S: Sequence[int] | npt.NDArray[np.int64],
    execution_S: Sequence[int] | npt.NDArray[np.int64],
) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Array]]:
    """Yields (positions of the scored samples, execution index of each, reward of each execution) per group."""
    groups, executions = np.asarray(group_index_S), np.asarray(execution_S)
    assert rewards.shape == groups.shape == executions.shape, f"{rewards.shape}, {groups.shape}, {executions.shape}"
    scored = np.flatnonzero(~np.isnan(rewards))
    scored = scored[np.argsort(groups[scored], kind="stable")]
    for members in np.split(scored, np.flatnonzero(np.diff(groups[scored])) + 1) if len(scored) else ():
        _, which = np.unique(executions[members], return_inverse=True)
        yield members, which, np.bincount(which, weights=rewards[members]) / np.bincount(which)


def nothing_to_compare(own: Array) -> bool:
    """Returns whether a group has fewer than two executions or equal rewards."""
    return len(own) < 2 or bool(np.ptp(own) <= EQUAL_TOLERANCE * np.abs(own).max())


STD_EPSILON = 1e-6
"""Added to the (unbiased) standard deviation."""
Scale = Literal["group", "batch", "none"]
"""The samples over which the standard deviation is computed."""

_COMPARES = (Need(lambda s: s.rewards_normalization, "rewards_normalization"),)


@ESTIMATORS.register("grpo")
@dataclass(frozen=True, kw_only=True)
class GroupRelative(GroupEstimator):
    """GRPO (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300): A = (R - group mean) / (group std + eps).

    Without the division, this is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
    """

    grpo_std_normalization: bool = derived(
        lambda s: s.n_samples_per_prompt != 1,
        lambda s: (
            "a group of one sample has no standard deviation"
            if s.n_samples_per_prompt == 1
            else "rewards are divided by the standard deviation of the group"
        ),
        off_names=("--disable-grpo-std-normalization",),
        needs=_COMPARES,
        asks=always,
    )
    """Divide by the standard deviation of the group's rewards (off: Dr. GRPO, arXiv:2503.20783)."""
    advantage_scale: Scale = derived(
        lambda s: "group" if s.grpo_std_normalization else "none",
        lambda s: f"grpo_std_normalization {s.grpo_std_normalization}",
        needs=_COMPARES,
    )
    """Which standard deviation to divide by (grpo, grpo_turn, gspo, cispo, sapo): of the group, of the batch, or none.
    Default: group, or none with --disable-grpo-std-normalization."""
    advantage_epsilon: float = opt(
        STD_EPSILON,
        needs=(*_COMPARES, Need(lambda s: s.advantage_scale != "none", "advantage_scale group or batch")),
        ge=0,
        le=1_000,
    )
    """Added to the standard deviation before dividing by it."""

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
    """Returns each reward minus its group mean [S], divided by the standard deviation of `scale` plus `epsilon`.

    group: standard deviation of the group. batch: standard deviation over all executions of the batch. none: no
    division.
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


@ESTIMATORS.register("grpo_turn")
@dataclass(frozen=True, kw_only=True)
class TurnRelative(Discounts, GroupRelative):
    """Turn-level GRPO: A_k = (G_k - mean) / (std + eps) at the tokens of turn k, over the executions that reached turn
    k, with the discounted return of the turns G_k = r_k + gamma * G_{k+1} instead of the reward.

    Turn-level credit as in MT-GRPO (Zeng et al. 2025, arXiv:2505.11821), but for any number of turns: MT-GRPO compares
    the reward of the first turn and the outcome separately, and adds the two advantages.
    """

    compares_turns: ClassVar[bool] = True

    def estimate(self, batch: RewardedBatch) -> Estimate:
        masks, kl_S, coef = batch.masks, batch.kl_S, batch.kl_coef
        found = [_compared_turns(batch, p, self.gamma) for p in range(len(masks))]
        counts = [len(turns) for turns, _ in found]
        numbers = np.concatenate([*(turns for turns, _ in found), np.zeros(0, np.intp)])
        values = np.concatenate([*(returns for _, returns in found), np.zeros(0)])
        if self.rewards_normalization:
            samples = np.repeat(np.arange(len(masks)), counts)
            _, groups = np.unique(np.stack([batch.groups[samples], numbers]), axis=1, return_inverse=True)
            values = self.compared(values, groups.reshape(-1), batch.executions[samples])
        advantages = np.split(np.nan_to_num(values, nan=0.0), np.cumsum(counts)[:-1])

        def one(p: int) -> Array:
            starts, kl = _turn_starts(batch, p), kl_S[p]
            of_turn = np.zeros(len(starts) + 1)  # the first one is for tokens before the first turn
            of_turn[found[p][0] + 1] = advantages[p]
            lengths = np.diff(starts, prepend=0, append=len(masks[p]))
            return spread_advantage(0.0, masks[p], kl, coef) + kept(np.repeat(of_turn, lengths), masks[p])

        return Estimate(batch.computed(one))


def _turn_starts(batch: RewardedBatch, p: int) -> npt.NDArray[np.intp]:
    """Returns the positions [K] at which the turns of a sample start.

    A turn is a run of sampled tokens, trained or not, and the observations that follow it. So siblings that mask
    earlier turns keep the numbers of their turns.
    """
    acted = is_trained(batch.masks[p])
    if batch.token_versions is not None:
        acted = acted | (np.asarray(batch.token_versions[p]) != NOT_SAMPLED)
    starts = np.flatnonzero(acted[1:] > acted[:-1]) + 1
    return np.concatenate([[0], starts]) if acted[:1].any() else starts


def _compared_turns(batch: RewardedBatch, p: int, gamma: float) -> tuple[npt.NDArray[np.intp], Array]:
    """Returns (turns in which a sample is compared, their returns G_k; NaN for an unscored sample).

    The sample's reward comes in its last turn. Compared are the turns that it trains. A sample without trained tokens
    (`remove_sample`) still counts in the statistics of its group, with all its turns.
    """
    starts, trained, own = _turn_starts(batch, p), is_trained(batch.masks[p]), batch.token_rewards_S[p]
    if not len(starts):
        return starts, np.zeros(0)
    rewards, reward = np.zeros(len(starts)), float(batch.rewards[p])
    if own is not None:
        places = starts[0] + np.flatnonzero(own[starts[0] :])
        np.add.at(rewards, np.searchsorted(starts, places, side="right") - 1, own[places])
    rewards[-1] += reward
    returns = np.full(len(starts), np.nan) if np.isnan(reward) else reverse_scan(rewards, gamma)
    compared = np.logical_or.reduceat(trained, starts)
    turns = np.flatnonzero(compared if compared.any() else np.ones(len(starts), np.bool_))
    return turns, returns[turns]


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

    The baseline does not include the execution's own reward, so it adds no bias.
    """

    def compared(self, rewards: Array, groups: npt.NDArray[np.int64], executions: npt.NDArray[np.int64]) -> Array:
        return leave_one_out(rewards, groups, executions)


def leave_one_out(
    rewards_S: Sequence[float] | Array,
    group_index_S: Sequence[int] | npt.NDArray[np.int64],
    execution_S: Sequence[int] | npt.NDArray[np.int64],
) -> Array:
    """Returns each reward minus the mean of the other executions in the group [S]; 0 if there are none."""
    rewards = np.asarray(rewards_S, np.float64)
    out = np.zeros_like(rewards)
    for members, which, own in iter_groups(rewards, group_index_S, execution_S):
        if not nothing_to_compare(own):
            out[members] = rewards[members] - (own.sum() - own[which]) / (len(own) - 1)
    return out


@ESTIMATORS.register("maxrl")
@dataclass(frozen=True, kw_only=True)
class MaximumLikelihood(GroupEstimator):
    """MaxRL (Tajwar et al. 2026, arXiv:2602.02710): A = (R - group mean) / group mean, for rewards of 0 and 1.

    The gradient of the log of the success probability p is that of p divided by p, so prompts that are rarely solved
    count more. With G executions, the expected gradient is that of log p up to the term G - 1 of its series
    log p = -sum_k (1 - p)^k / k. Groups without a success have advantage 0.
    """

    def compared(self, rewards: Array, groups: npt.NDArray[np.int64], executions: npt.NDArray[np.int64]) -> Array:
        return success_advantages(rewards, groups, executions)

    def check(self, args: Args) -> str | None:
        if args.overlong_buffer_len is not None or args.length_reward_coef:
            return (
                "advantage_estimator maxrl needs rewards that are not negative, but --overlong-buffer-len and "
                "--length-reward-coef subtract from them; drop them, or use another estimator"
            )
        return super().check(args)


def success_advantages(
    rewards_S: Sequence[float] | Array,
    group_index_S: Sequence[int] | npt.NDArray[np.int64],
    execution_S: Sequence[int] | npt.NDArray[np.int64],
) -> Array:
    """Returns each reward minus its group mean, divided by the group mean [S]; 0 if there is nothing to compare.

    Raises `DataError` for a negative reward: the mean would not be a rate of success.
    """
    rewards = np.asarray(rewards_S, np.float64)
    if (negative := rewards[rewards < 0]).size:
        raise DataError(
            f"maxrl divides by the mean reward of a group, a rate of success, but a reward is {negative[0]:g}; use "
            "rewards of 0 and 1, or another --advantage-estimator"
        )
    out = np.zeros_like(rewards)
    for members, _, own in iter_groups(rewards, group_index_S, execution_S):
        if not nothing_to_compare(own):
            out[members] = (rewards[members] - np.mean(own)) / np.mean(own)
    return out
