"""A dynamic filter: trains on prompts that the model solves sometimes, neither never nor always.

    python train.py ... --dynamic-sampling-filter-path examples.learnable_groups:keep --over-sampling-batch-size 48

A dropped group is replaced by another prompt, and counted as `rollout/dynamic_filter/drop_<reason>` and in the ledger.
`slime.rollout.filters:check_reward_nonzero_std` is the built-in that drops groups without any difference.
"""

from __future__ import annotations

from typing import Any

from slime.core.sample import Sample
from slime.rollout.filters import execution_rewards
from slime.rollout.types import DynamicFilterOutput

LOWEST, HIGHEST = 0.1, 0.9
"""Bounds of the mean reward of a group worth its tokens."""


def keep(args: Any, samples: list[Sample]) -> DynamicFilterOutput:
    """The verdict on one finished group."""
    rewards = execution_rewards(args, samples)
    mean = sum(rewards) / max(len(rewards), 1)
    if mean < LOWEST:
        return DynamicFilterOutput(keep=False, reason="too_hard")
    return DynamicFilterOutput(keep=mean <= HIGHEST, reason=None if mean <= HIGHEST else "too_easy")
