"""Per-execution rewards, and the built-in dynamic sampling filters (`--dynamic-sampling-filter-path`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slime.core.sample import Sample
from slime.rollout.types import DynamicFilterOutput
from slime.settings.groups.reward import RewardSettings


def without_unscored(samples: Sequence[Sample]) -> list[Sample]:
    """Drops unscored samples, for user functions that expect a numeric reward."""
    return [s for s in samples if s.reward is not None or not s.unscored]


def reward_of_executions(samples: Sequence[Sample], reward_key: str | None) -> dict[int | None, float]:
    """Returns execution index -> mean reward of its fan-out siblings. Skips unscored executions."""
    rewards: dict[int | None, list[float]] = {}
    for sample in samples:
        reward = sample.get_reward_value(reward_key)
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

    Compares rewards exactly, because rounding can make the standard deviation of equal floats nonzero.
    """
    rewards = execution_rewards(args, samples)
    if len(set(rewards)) > 1:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{rewards[0]:g}" if rewards else "no_reward")


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Like `check_reward_nonzero_std`, but keeps the group if the step would otherwise have to draw another prompt.

    Intended for `--over-sampling-batch-size` above `--rollout-batch-size`.
    """
    return replace(check_reward_nonzero_std(args, samples), keep_when_insufficient=True)
