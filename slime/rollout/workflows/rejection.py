"""Rejection sampling: samples `n` responses per prompt, and fine-tunes on the good ones (`--loss-type sft_loss`).

    --loss-type sft_loss --rollout-function-path slime.rollout.loop.generate_rollout --n-samples-per-prompt 8
    --dynamic-sampling-filter-path slime.rollout.workflows.rejection.has_right      # drops prompts without a good one
    --rollout-sample-filter-path slime.rollout.workflows.rejection.keep_right       # or keep_best
    --drop-masked-executions                                 # averages over kept executions only (loss_aggregation)

The other executions stay in the batch and its metrics, but are masked. Unscored executions are always masked and never
compared with others. Settings under `custom` in `--custom-config-path`: `min_reward` (1.0) is the lowest reward that
counts as right, and `num_kept` (1) is the number of executions that `keep_best` keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.core.sample import Sample
from slime.rollout.filters import execution_rewards, reward_of_executions
from slime.rollout.types import DynamicFilterOutput
from slime.settings import Args
from slime.settings.groups.reward import RewardSettings


def _keep(
    args: RewardSettings,
    groups: list[list[Sample]],
    chosen: Callable[[dict[int | None, float]], set[int | None]],
    *,
    total: bool = False,
) -> None:
    """Masks all executions except those that `chosen` selects, given the rewards of the scored executions.

    `total`: including the rewards of tokens.
    """
    for group in groups:
        kept = chosen(reward_of_executions(group, args.reward_key, total=total))
        for sample in group:
            sample.remove_sample = sample.remove_sample or sample.index not in kept


def _min_reward(args: Args) -> float:
    return float(args.custom.get("min_reward", 1.0))


def keep_right(args: Any, groups: list[list[Sample]]) -> None:
    """Sample filter: keeps only executions with a reward of at least `min_reward`."""
    _keep(args, groups, lambda rewards: {i for i, reward in rewards.items() if reward >= _min_reward(args)})


def keep_best(args: Any, groups: list[list[Sample]]) -> None:
    """Sample filter: keeps only the `num_kept` executions with the highest total rewards for each prompt.

    Keeps none if all rewards of a prompt are equal. On a tie, the earlier execution wins.
    """

    def best(rewards: dict[int | None, float]) -> set[int | None]:
        ranked = sorted(rewards, key=lambda i: -rewards[i])
        return set(ranked[: int(args.custom.get("num_kept", 1))]) if len(set(rewards.values())) > 1 else set()

    _keep(args, groups, best, total=True)


def has_right(args: Any, samples: list[Sample], **_: Any) -> DynamicFilterOutput:
    """Dynamic filter: drops a prompt if `keep_right` would keep none of its executions."""
    keep = any(reward >= _min_reward(args) for reward in execution_rewards(args, samples))
    return DynamicFilterOutput(keep=keep, reason=None if keep else "none_right")
