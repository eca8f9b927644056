"""A dynamic filter that keeps prompts that the model solves sometimes, but not always.

    python train.py ... --dynamic-sampling-filter-path examples.learnable_groups:keep --over-sampling-batch-size 48

A dropped group is replaced by a new prompt. `rollout/dynamic_filter/drop_<reason>` and the ledger count dropped groups.
The built-in `slime.rollout.filters:check_reward_nonzero_std` drops groups with equal rewards.
"""

from __future__ import annotations

from typing import Any

from slime.core.sample import Sample
from slime.rollout.filters import execution_rewards
from slime.rollout.types import DynamicFilterOutput

LOWEST, HIGHEST = 0.1, 0.9
"""Groups with a mean reward between these bounds are kept."""


def keep(args: Any, samples: list[Sample]) -> DynamicFilterOutput:
    """Whether to keep one finished group."""
    rewards = execution_rewards(args, samples)
    mean = sum(rewards) / max(len(rewards), 1)
    if mean < LOWEST:
        return DynamicFilterOutput(keep=False, reason="too_hard")
    return DynamicFilterOutput(keep=mean <= HIGHEST, reason=None if mean <= HIGHEST else "too_easy")
