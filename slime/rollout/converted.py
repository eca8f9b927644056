"""The public form of `--custom-convert-samples-to-train-data-path`: a dict of columns, with one entry for each sample.

Read are tokens, response_lengths, rewards, loss_masks, truncated, rollout_log_probs, teacher_log_probs and, for the
execution of each entry, sample_indices or rollout_ids; what is missing is the sample's own. Rewards are trained as they
are. Other columns are left alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.core.batch import TrainSample
from slime.core.errors import HookError
from slime.core.sample import NOT_SAMPLED, Sample

_FLAG = "--custom-convert-samples-to-train-data-path"


def from_columns(samples: Sequence[Sample], columns: Mapping[str, Any]) -> tuple[TrainSample, ...]:
    """The records of a dict. Raises `HookError` for columns of different lengths, or for executions of no sample."""
    rewards = columns.get("rewards", ())
    known = {name: values for name, values in columns.items() if name in _COLUMNS}
    lengths = {name: len(values) for name, values in known.items()}
    if not len(rewards) or len(set(lengths.values())) != 1:
        raise HookError(f"got columns of lengths {lengths} from {_FLAG}; give rewards, and as many entries in others")
    owners = _owners(samples, columns, len(rewards))
    return tuple(_record(owner, {n: v[i] for n, v in known.items()}) for i, owner in enumerate(owners))


_COLUMNS = (
    *("tokens", "response_lengths", "rewards", "loss_masks", "truncated", "rollout_log_probs", "teacher_log_probs"),
    *("sample_indices", "rollout_ids"),
)


def _owners(samples: Sequence[Sample], columns: Mapping[str, Any], num: int) -> list[Sample]:
    """The sample that each entry is made of: the one at its place, else the first of its execution."""
    if num == len(samples):
        return list(samples)
    by_index = {sample.index: sample for sample in reversed(samples)}
    indices = columns.get("sample_indices", columns.get("rollout_ids", ()))
    strays = [index for index in indices if index not in by_index]
    if len(indices) != num or strays:
        raise HookError(
            f"got {num} entries for {len(samples)} samples from {_FLAG}, with executions {list(indices)[:8]}; say in "
            "sample_indices of which sample (sample.index) each is"
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
    for name in ("rollout_log_probs", "teacher_log_probs"):
        if entry.get(name) is not None:
            changes[name] = np.asarray(entry[name], np.float32)
    odd = {n: len(v) for n, v in changes.items() if n.endswith(("_probs", "mask")) and v is not None and len(v) != num}
    if odd or not 0 <= num < len(tokens):
        raise HookError(f"got {odd or len(tokens)} for a response of {num} tokens from {_FLAG}; one entry for each")
    return dataclasses.replace(record, **changes)
