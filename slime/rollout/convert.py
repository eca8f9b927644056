"""From finished groups to the `TrainBatch`: canonical order, one scalar reward per sample, everything checked.

Invariants
1. The order is (group_index, index, position within the execution): no scheduling changes it.
2. Every sample is scored, or says in `unscored` why not: then its reward is NaN, it enters no statistics
   and trains nothing. Any other without a reward is an error here, never a zero.
3. Rewards are raw: advantages are computed by the trainer over `group_index`, never by position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import DataError, HookError
from slime.core.sample import Sample, Status
from slime.rollout.converted import from_columns
from slime.rollout.filters import without_unscored
from slime.rollout.hooks import load
from slime.settings import Args


def in_order(groups: Sequence[Sequence[Sample]]) -> list[Sample]:
    """All samples in canonical order. Raises `DataError` on one without identity or that is not complete."""
    samples = [s for group in groups for s in group]
    for sample in samples:
        if sample.group_index is None or sample.index is None:
            raise DataError(f"got a sample without identity: group_index={sample.group_index}, index={sample.index}")
        if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
            raise DataError(
                f"got sample {sample.index} of group {sample.group_index} with status {sample.status.value}; "
                "only finished samples can be trained: put the others back into the data source"
            )
    return sorted(samples, key=lambda s: (s.group_index or 0, s.index or 0))  # stable: siblings keep their order


def sample_rewards(args: Args, samples: Sequence[Sample]) -> list[float]:
    """[S] scalar rewards: of the user's post-processing if given, else `--reward-key` of the sample's; NaN if unscored.

    Raises `DataError` on a missing or non-finite reward, `HookError` if the hook breaks its contract.
    """
    every, samples = samples, without_unscored(samples)
    post_process = load(args.custom_reward_post_process_path, "reward_post_process")
    if post_process is None:
        rewards = [s.get_reward_value(args.reward_key) for s in samples]
    else:
        result = post_process(args, list(samples))
        if not isinstance(result, tuple) or len(result) != 2 or len(result[1]) != len(samples):
            raise HookError(
                f"got {type(result).__name__} from --custom-reward-post-process-path for {len(samples)} samples; "
                "it returns (raw_rewards, rewards), each with one number per sample"
            )
        rewards = [None if r is None else float(r) for r in result[1]]
    for sample, reward in zip(samples, rewards, strict=True):
        if reward is None or not math.isfinite(reward):
            raise DataError(
                f"got reward {reward} for sample {sample.index} of group {sample.group_index}; every trained "
                "sample needs a finite one: a failure is put back or dropped, never scored"
            )
    values = {id(s): float(r) for s, r in zip(samples, rewards, strict=True) if r is not None}
    return [values.get(id(s), math.nan) for s in every]


def to_train_batch(args: Args, rollout_id: int, groups: Sequence[Sequence[Sample]]) -> TrainBatch:
    """Freezes one step's samples. Raises `DataError` if there are none or one breaks its contract."""
    samples = in_order(groups)
    if not samples:
        raise DataError(f"got no samples for step {rollout_id}; there is nothing to train")
    convert = load(args.custom_convert_samples_to_train_data_path, "convert_samples")
    if convert is not None:
        converted = convert(args, samples)
        if isinstance(converted, dict):
            _require_final_rewards(args)
            converted = from_columns(samples, converted)
        converted = converted.samples if isinstance(converted, TrainBatch) else tuple(converted)
        if not converted or not all(isinstance(s, TrainSample) for s in converted):
            raise HookError(
                "got something other than TrainSample records from --custom-convert-samples-to-train-data-path; it "
                "returns a dict of columns, or a list of slime.core.batch.TrainSample (see TrainSample.from_sample)"
            )
        return TrainBatch(rollout_id, converted)
    rewards = sample_rewards(args, samples)
    return TrainBatch(
        rollout_id, tuple(TrainSample.from_sample(s, reward=r) for s, r in zip(samples, rewards, strict=True))
    )


def _require_final_rewards(args: Args) -> None:
    """Columns hold the rewards to train on. Raises `HookError` if they would be normalised once more."""
    if args.components.get("rewards_normalization"):
        raise HookError(
            "got a dict from --custom-convert-samples-to-train-data-path with --rewards-normalization, which would "
            "normalise its rewards once more; drop the switch"
        )
