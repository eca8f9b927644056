"""Turns finished groups into a `TrainBatch`, and tracks batches that have not been trained yet.

Invariants
1. Samples are ordered by (group_index, index, position within the execution) under every schedule.
2. Every sample has a score, or its reward is NaN and `unscored` gives the reason. Unscored samples are excluded from
   statistics and training. Any other missing reward is an error and never becomes zero.
3. Rewards are raw, plus what the settings give for length. The trainer computes advantages per `group_index`, never by
   position.
4. The groups of a batch stay in flight in the buffer until `commit`. If the run is saved before the commit, a resumed
   run reissues them.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.buffer.data_buffer import DataBuffer
from slime.core.batch import TrainBatch, TrainSample, trains_any
from slime.core.errors import DataError, HookError, LedgerError
from slime.core.sample import NOT_SAMPLED, Sample, Status
from slime.core.text import step_name
from slime.observability.logs import TELL_DRIVER
from slime.rewards.scores import length_rewards, overlong_penalty
from slime.rollout.filters import without_unscored
from slime.rollout.transcript import NO_ENGINE, first_not_sampled, is_refused, tell_refused
from slime.rollout.user_functions import load
from slime.settings import Args, for_hook
from slime.settings.conditions import trains_given_tokens
from slime.settings.groups.reward import longest_response

_FLAG = "--custom-convert-samples-to-train-data-path"


def from_columns(samples: Sequence[Sample], columns: Mapping[str, Any]) -> tuple[TrainSample, ...]:
    """Converts a dict of columns returned by `--custom-convert-samples-to-train-data-path`, with one entry per training
    sample.

    Reads the columns in `_COLUMNS` and ignores others; the last two name the execution of each entry. Missing columns
    are filled in from the samples. Rewards are used as they are. Raises `HookError` if lengths differ or an execution
    is unknown.
    """
    rewards = columns.get("rewards", ())
    known = {name: values for name, values in columns.items() if name in _COLUMNS}
    lengths = {name: len(values) for name, values in known.items()}
    if not len(rewards) or len(set(lengths.values())) != 1:
        raise HookError(f"{_FLAG} returned columns of lengths {lengths}; return rewards, and columns of equal length")
    owners = _owners(samples, columns, len(rewards))
    return tuple(_record(owner, {n: v[i] for n, v in known.items()}) for i, owner in enumerate(owners))


_COLUMNS = (
    *("tokens", "response_lengths", "rewards", "loss_masks", "truncated", "rollout_log_probs", "teacher_log_probs"),
    *("token_rewards", "metadata", "sample_indices", "rollout_ids"),
)


def _owners(samples: Sequence[Sample], columns: Mapping[str, Any], num: int) -> list[Sample]:
    """Returns each entry's sample: by position if the counts match, else the first sample of its execution."""
    if num == len(samples):
        return list(samples)
    by_index = {sample.index: sample for sample in reversed(samples)}
    indices = columns.get("sample_indices", columns.get("rollout_ids", ()))
    strays = [index for index in indices if index not in by_index]
    if len(indices) != num or strays:
        raise HookError(
            f"{_FLAG} returned {num} entries for {len(samples)} samples, with the executions {list(indices)[:8]}; "
            "sample_indices must contain the execution (sample.index) of each entry"
        )
    return [by_index[index] for index in indices]


def _record(sample: Sample, entry: Mapping[str, Any]) -> TrainSample:
    record = TrainSample.from_sample(sample, reward=float(entry["rewards"]))
    tokens = np.asarray(entry.get("tokens", record.tokens), np.int32)
    num = int(entry.get("response_lengths", record.response_length))
    same = num == record.response_length and np.array_equal(tokens, record.tokens)
    mask = entry.get("loss_masks", record.loss_mask if same else None)
    changes: dict[str, Any] = {
        "tokens": tokens,
        "loss_mask": np.ones(num, np.float32) if mask is None else np.asarray(mask, np.float32),
        "truncated": bool(entry.get("truncated", record.truncated)),
    }
    if sample.remove_sample:
        changes["loss_mask"] = np.zeros(num, np.float32)
    if not same:
        unknown = {"teacher_log_probs": None, "routed_experts": None, "rollout_log_probs": None}
        changes |= {**unknown, "token_versions": np.full(num, NOT_SAMPLED, np.int32)}
        if record.token_rewards is not None and entry.get("token_rewards") is None:
            raise HookError(
                f"{_FLAG} changed the tokens of sample {sample.index}, which has token_rewards; return a column "
                "token_rewards for the new tokens"
            )
    kinds = {"rollout_log_probs": np.float32, "teacher_log_probs": np.float32, "token_rewards": np.float64}
    changes |= {name: np.asarray(entry[name], kind) for name, kind in kinds.items() if entry.get(name) is not None}
    if "metadata" in entry:
        changes["metadata"] = entry["metadata"]
    odd = {
        n: len(v)
        for n, v in changes.items()
        if n.endswith(("_probs", "mask", "_rewards")) and v is not None and len(v) != num
    }
    if odd:
        raise HookError(f"{_FLAG} returned {odd} values for a response of {num} tokens; return one value per token")
    if not 0 <= num < len(tokens):
        raise HookError(f"{_FLAG} returned {len(tokens)} tokens for a response of {num}; return prompt and response")
    return dataclasses.replace(record, **changes)


def in_order(groups: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Returns all samples in canonical order. Raises `DataError` if a sample lacks an index or is not finished."""
    samples = [s for group in groups for s in group]
    for sample in samples:
        if sample.group_index is None or sample.index is None:
            raise DataError(
                f"a sample has group_index {sample.group_index} and index {sample.index}; a rollout function must "
                "preserve both"
            )
        if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
            raise DataError(
                f"sample {sample.index} of group {sample.group_index} has status {sample.status.value}, but only "
                "finished samples can be trained on; put the others back into the data source"
            )
    return sorted(samples, key=lambda s: (s.group_index or 0, s.index or 0))  # stable: siblings keep their order


def sample_rewards(args: Args, samples: Sequence[Sample]) -> list[float]:
    """Returns [S] rewards, from the user's post-processing, or by `--reward-key` and with what the settings give for
    length; NaN if unscored.

    Raises `DataError` if a reward is missing or not finite, and `HookError` if the hook breaks its contract.
    """
    every, samples = samples, without_unscored(samples)
    post_process = load(args.custom_reward_post_process_path, "reward_post_process")
    if post_process is None or not samples:
        rewards = [s.get_reward_value(args.reward_key) for s in samples]
        given = zip(rewards, _rewards_for_length(args, samples, rewards), strict=True)
        rewards = [None if reward is None else reward + extra for reward, extra in given]
    else:
        result = post_process(for_hook(args), list(samples))
        if not isinstance(result, tuple) or len(result) != 2 or len(result[1]) != len(samples):
            raise HookError(
                f"--custom-reward-post-process-path returned {type(result).__name__} for {len(samples)} samples; "
                "it must return (raw_rewards, rewards), each with one number per sample"
            )
        rewards = [None if r is None else float(r) for r in result[1]]
    for sample, reward in zip(samples, rewards, strict=True):
        if reward is None or not math.isfinite(reward):
            raise DataError(
                f"the reward of sample {sample.index} of group {sample.group_index} is {reward}, but every trained "
                "sample needs a finite reward; put failed samples back or drop them, but never score them"
            )
    values = {id(s): float(r) for s, r in zip(samples, rewards, strict=True) if r is not None}
    return [values.get(id(s), math.nan) for s in every]


def _rewards_for_length(args: Args, samples: Sequence[Sample], rewards: Sequence[float | None]) -> list[float]:
    """Returns [S] what `--overlong-buffer-len` and `--length-reward-coef` add to the reward of each sample."""
    extra = [0.0] * len(samples)
    if args.overlong_buffer_len is None and not args.length_reward_coef:
        return extra
    lengths = [_num_sampled(s) for s in samples]
    if args.overlong_buffer_len is not None:
        limit, buffer = longest_response(args), args.overlong_buffer_len
        extra = [args.overlong_penalty_factor * overlong_penalty(length, limit, buffer) for length in lengths]
    if args.length_reward_coef:
        groups: dict[int | None, list[int]] = {}
        for place, sample in enumerate(samples):
            groups.setdefault(sample.group_index, []).append(place)
        for places in groups.values():
            correct = [(rewards[p] or 0.0) > 0.0 for p in places]
            for p, value in zip(places, length_rewards([lengths[p] for p in places], correct), strict=True):
                extra[p] += args.length_reward_coef * value
    return extra


def _num_sampled(sample: Sample) -> int:
    """Returns the length of a response without tool output and template text."""
    versions = sample.column("token_versions")
    return sample.response_length if versions is None else int(np.count_nonzero(versions != NOT_SAMPLED))


def to_train_batch(args: Args, rollout_id: int, groups: Sequence[Sequence[Sample]]) -> TrainBatch:
    """Builds the batch of a step. Raises `DataError` if there are no samples or a sample is invalid.

    Warns if the batch has no trained token, so that the step changes no weights.
    """
    samples = in_order(groups)
    if not samples:
        raise DataError(f"step {rollout_id} has no samples to train on; the rollout function must return some")
    batch = _batch_of(args, rollout_id, samples)
    if not trains_any(batch.samples):
        _tell_untrained(rollout_id, samples)
    return batch


def _tell_untrained(rollout_id: int, samples: Sequence[Sample]) -> None:
    """Shows on the console why a step trains nothing."""
    refused = [sample for sample in samples if is_refused(sample)]
    unscored = [sample for sample in samples if sample.reward is None and sample.unscored]
    reason = (refused or unscored or samples)[0].unscored or "masked"
    text = (
        "%s TRAINS NOTHING, so the weights stay as they are: of its %d samples, %d are refused, %d others have no "
        "reward, and the rest is masked. The first reason: %s. The run goes on; stop it if this repeats"
    )
    numbers = len(samples), len(refused), len(unscored) - len(refused)
    logger.warning(text, step_name(rollout_id), *numbers, reason, extra=TELL_DRIVER)


def _batch_of(args: Args, rollout_id: int, samples: Sequence[Sample]) -> TrainBatch:
    convert = load(args.custom_convert_samples_to_train_data_path, "convert_samples")
    if convert is not None and without_unscored(samples):
        converted = convert(for_hook(args), samples)
        if isinstance(converted, dict):
            _require_final_rewards(args)
            converted = from_columns(samples, converted)
        converted = converted.samples if isinstance(converted, TrainBatch) else tuple(converted)
        if not converted or not all(isinstance(s, TrainSample) for s in converted):
            raise HookError(
                f"{_FLAG} must return a dict of columns, or a list of slime.core.batch.TrainSample, built with "
                "TrainSample.from_sample"
            )
        return TrainBatch(rollout_id, _without_unsampled(args, rollout_id, converted))
    rewards = sample_rewards(args, samples)
    return TrainBatch(
        rollout_id, tuple(TrainSample.from_sample(s, reward=r) for s, r in zip(samples, rewards, strict=True))
    )


def _without_unsampled(args: Args, rollout_id: int, converted: Sequence[TrainSample]) -> tuple[TrainSample, ...]:
    """Returns the samples of a conversion, unscored where trained tokens are not known to be sampled (law 1)."""
    checked, refused = [], []
    for sample in converted:
        known = sample.loss_mask > 0, sample.token_versions, sample.rollout_log_probs
        place = None if trains_given_tokens(args) else first_not_sampled(*known)
        if place is not None:
            refused.append(f"response token {place} of sample {sample.index} is trained, but {NO_ENGINE}")
            sample = dataclasses.replace(sample, reward=math.nan)
        checked.append(sample)
    tell_refused(rollout_id, len(refused), refused[0] if refused else "")
    return tuple(checked)


def _require_final_rewards(args: Args) -> None:
    """Raises `HookError` if rewards that are already final would be normalised again."""
    if args.components.get("rewards_normalization"):
        raise HookError(
            f"{_FLAG} returned a dict of columns with final rewards, but --rewards-normalization would normalise them "
            "again; remove --rewards-normalization"
        )


logger = logging.getLogger(__name__)


class BatchAccount:
    """Tracks the groups of each step's batch. Checks the ledger on each call."""

    def __init__(self, buffer: DataBuffer, *, trains: bool) -> None:
        """`trains`: whether each commit creates a new weight version."""
        self._buffer, self._trains = buffer, trains
        self._handed_out: dict[int, list[int]] = {}
        self.last_step: int | None = None
        """The latest trained step."""

    def in_flight(self) -> set[int]:
        """Returns the indices of the groups in flight."""
        return set(self._buffer.in_flight)

    def hand_out(self, rollout_id: int, groups: Sequence[Sequence[Sample]], *, before: set[int] | None) -> None:
        """Records the groups of a batch.

        `before`: groups in flight before the step; None if the schedule keeps groups in flight between steps. A group
        that was issued during the step but is missing from the batch was dropped by a user function, and is marked
        filtered.
        """
        indices = sorted({s.group_index for group in groups for s in group if s.group_index is not None})
        dropped = [] if before is None else sorted(self.in_flight() - before - set(indices))
        if dropped:
            logger.info("%d groups were issued to the rollout function but not returned", len(dropped))
            self._buffer.mark_filtered(dropped, "not_returned")
        self._handed_out[rollout_id] = indices
        self._buffer.ledger().check()

    def commit(self, rollout_id: int) -> None:
        """Marks the groups of a step as trained. Raises `LedgerError`."""
        if rollout_id not in self._handed_out:
            raise LedgerError(f"step {rollout_id} cannot be committed: it was not generated or is already committed")
        self._buffer.mark_trained(self._handed_out.pop(rollout_id))
        self.last_step = rollout_id
        self._buffer.weight_version += self._trains
        self._buffer.ledger().check()

    def clear(self) -> None:
        """Discards all batches, because a loaded buffer reissues their groups."""
        self._handed_out.clear()
