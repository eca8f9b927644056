"""Per-execution rewards, and the built-in dynamic sampling filters (`--dynamic-sampling-filter-path`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slime.core.sample import Sample
from slime.rollout.types import DynamicFilterOutput
from slime.settings.conditions import estimator_of
from slime.settings.groups.reward import RewardSettings


def without_unscored(samples: Sequence[Sample]) -> list[Sample]:
    """Drops unscored samples, for user functions that expect a numeric reward."""
    return [s for s in samples if s.reward is not None or not s.unscored]


def has_grader(args: Any, sample: Sample) -> bool:
    """Returns whether a grader or a reward function is set for the sample, by the run or by the sample itself."""
    return bool(args.rm_type or args.custom_rm_path or sample.custom_rm_path or sample.metadata.get("rm_type"))


def reward_of_executions(
    samples: Sequence[Sample], reward_key: str | None, *, total: bool = False
) -> dict[int | None, float]:
    """Returns execution index -> mean reward of its fan-out siblings. Skips unscored executions.

    `total`: including the rewards of tokens.
    """
    rewards: dict[int | None, list[float]] = {}
    for sample in samples:
        reward = sample.total_reward(reward_key) if total else sample.get_reward_value(reward_key)
        if reward is not None:
            rewards.setdefault(sample.index, []).append(reward)
    return {index: sum(values) / len(values) for index, values in rewards.items()}


def rewards_by_execution(samples: Sequence[Sample], reward_key: str | None) -> list[float]:
    return list(reward_of_executions(samples, reward_key).values())


def execution_rewards(args: RewardSettings, samples: list[Sample]) -> list[float]:
    """Like `rewards_by_execution`, with the key from `--reward-key`."""
    return rewards_by_execution(samples, args.reward_key)


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Drops a group whose rewards are all equal, because its advantages are zero (DAPO, arXiv:2503.14476).

    Compares rewards exactly, because rounding can make the standard deviation of equal floats nonzero. Rewards include
    those of tokens. If the estimator compares turns, the rewards of each turn must be equal, too.
    """
    rewards = list(reward_of_executions(samples, args.reward_key, total=True).values())
    if len(set(rewards)) > 1 or (any(s.token_rewards for s in samples) and _turns_differ(args, samples)):
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{rewards[0]:g}" if rewards else "no_reward")


def _turns_differ(args: Any, samples: Sequence[Sample]) -> bool:
    """Returns whether token rewards differ in value or order between samples, and the estimator compares turns."""
    own = {tuple(r for r in s.token_rewards or () if r) for s in samples if s.reward is not None}
    return len(own) > 1 and bool(estimator_of(args).compares_turns)


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Like `check_reward_nonzero_std`, but keeps the group if the step would otherwise have to draw another prompt.

    Intended for `--over-sampling-batch-size` above `--rollout-batch-size`.
    """
    return replace(check_reward_nonzero_std(args, samples), keep_when_insufficient=True)
