"""Built-in dynamic sampling filters (`--dynamic-sampling-filter-path`): keep or drop a finished group."""

from __future__ import annotations

from typing import Any

from slime.core.sample import Sample
from slime.rollout.types import DynamicFilterOutput


def execution_rewards(args: Any, samples: list[Sample]) -> list[float]:
    """One reward per execution: the mean over its fan-out siblings."""
    rewards: dict[int | None, list[float]] = {}
    for sample in samples:
        reward = sample.get_reward_value(args.reward_key)
        if reward is not None:
            rewards.setdefault(sample.index, []).append(reward)
    return [sum(values) / len(values) for values in rewards.values()]


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Drops a group whose executions all have the same reward: its advantages are zero (DAPO, arXiv:2503.14476).

    Compares exactly; a standard deviation computed from equal floats need not be zero.
    """
    rewards = execution_rewards(args, samples)
    if len(set(rewards)) > 1:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{rewards[0]:g}" if rewards else "no_reward")
