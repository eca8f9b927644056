"""Groups in the Data Buffer: creation, reset, staleness, the user's buffer filter, and serialization (`GroupRecord`).

Invariants
1. A record is immutable and shares no mutable state with its group or with later users of the group.
2. `GroupRecord.of(group).group()` equals the group.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import orjson

from slime.core.columns import Column, Numbers
from slime.core.errors import DataError, LedgerError
from slime.core.routed_experts import RoutedExperts
from slime.core.sample import PER_TOKEN, TURN_COUNTS, Group, PromptRow, Sample, Status, fields_to_json

logger = logging.getLogger(__name__)

MAX_SAVED_TEXT = 2**24
"""Maximum length of a response text in a checkpoint, in characters. A million tokens rarely exceed it."""
BufferFilter = Callable[[list[list[Sample]], int], list[list[Sample]]]
"""`(buffered groups, n) -> at most n groups to issue`. Removes those and any dropped groups from the list in place."""


def apply_filter(buffer_filter: BufferFilter, queue: Sequence[Group], n: int) -> tuple[list[Group], list[Group]]:
    """Runs the user's buffer filter. Returns (chosen groups, groups left in the queue); all others were dropped.

    Raises `LedgerError` if the filter chooses more than `n` groups, returns an unknown group, or leaves a chosen group
    in the list.
    """
    by_index = {group.group_index: group for group in queue}
    left = [list(group.samples) for group in queue]
    chosen = [group_index_of(samples) for samples in buffer_filter(left, n)]
    remaining = [group_index_of(samples) for samples in left]
    both = chosen + remaining
    if len(chosen) > n or len(set(both)) < len(both) or not set(both) <= set(by_index):
        raise LedgerError(
            f"the buffer filter chose groups {chosen} and left {remaining} of {sorted(by_index)}; correct the "
            f"--buffer-filter-path function: it must choose at most {n} and remove them from the list in place"
        )
    return [by_index[index] for index in chosen], [by_index[index] for index in remaining]


def flatten(nest: Sequence[Any]) -> list[Sample]:
    return [s for item in nest for s in (flatten(item) if isinstance(item, list | tuple) else [item])]


def group_index_of(samples: Sequence[Sample]) -> int:
    """Returns the common `group_index` of the samples. Raises `DataError` if they differ or are missing."""
    found = {s.group_index for s in samples}
    index = next(iter(found), None)
    if len(found) != 1 or index is None:
        raise DataError(f"all samples of a group must have the same group_index, got {sorted(map(str, found))}")
    return index


RESTORED = ("prompt", "tokens", "images", "label", "metadata", "attributes", "generate_function_path", "custom_rm_path")
"""Fields from the dataset that user code may change."""


def _as_given(sample: Sample) -> dict[str, Any]:
    """Returns the `RESTORED` fields, without what generation added."""
    fields = {name: getattr(sample, name) for name in RESTORED if name != "tokens"}
    ids = sample.column("tokens")
    fields["tokens"] = [] if ids is None else ids[: sample.prompt_length].tolist()
    return {**fields, "metadata": {k: v for k, v in sample.metadata.items() if k != TURN_COUNTS}}


def note_changes(sample: Sample, before: Sample) -> None:
    """Stores the fields that user code changed since `before` in `sample.as_issued`, so that `reset` undoes it."""
    issued = {**_as_given(before), **before.as_issued}
    now = _as_given(sample)
    sample.as_issued = {name: value for name, value in issued.items() if not _equal(value, now[name])}


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # arrays, which user code may have stored
        return False


def reset(sample: Sample) -> Sample:
    """Returns the sample in its state before generation, with the prompt, label and metadata of the dataset."""
    return dataclasses.replace(
        sample,
        **copy.deepcopy(_as_given(sample) | sample.as_issued),
        as_issued={},
        response="",
        response_length=0,
        loss_mask=None,
        rollout_log_probs=None,
        token_versions=None,
        teacher_log_probs=None,
        token_rewards=None,
        rollout_routed_experts=None,
        reward=None,
        status=Status.PENDING,
        failure="",
        unscored="",
        ungradable="",
        started_version=None,
        remove_sample=False,
    )


def reset_group(group: Group) -> Group:
    """Returns the group in its state before generation, with one reset sample per execution."""
    first = {s.index: s for s in reversed(group.samples)}
    return group.with_samples([reset(s) for s in reversed(first.values())])


def oldest_version(group: Group) -> int | None:
    """Returns the oldest weight version among the group's tokens; None if no token was sampled."""
    return min((v for s in group.samples for v in s.weight_versions), default=None)


def with_bounded_text(sample: Sample, finished: bool) -> Sample:
    """Returns the sample to save in a checkpoint, with the response text truncated to `MAX_SAVED_TEXT`.

    A sample that no grader will read again (it is scored, or its group is `finished`) is only truncated. Any other
    sample is reset, because after a resume it would be graded or continued with a truncated text.
    """
    if len(sample.response) <= MAX_SAVED_TEXT:
        return sample
    logger.warning("checkpoint: truncated the %d characters of text of sample %s", len(sample.response), sample.index)
    bounded = sample.copy()  # reading fields of the original would convert its arrays to lists
    bounded.response = sample.response[:MAX_SAVED_TEXT]
    return bounded if finished or sample.reward is not None else reset(bounded)


# ---- group records -----------------------------------------------------------------------------------------------

LEVEL = 1
"""zlib level: halves the size of responses at 60 MB/s."""
EXPERTS = "rollout_routed_experts"


class Body(Protocol):
    """The content of a record, in memory or in a checkpoint."""

    def read(self) -> Content: ...


@dataclass(frozen=True, slots=True)
class Content:
    text: bytes
    """Compressed JSON of the group, with indices into `arrays` in place of arrays."""
    arrays: tuple[Numbers, ...]

    def read(self) -> Content:
        return self

    def owned(self) -> Content:
        """Returns a copy that owns the memory of its arrays."""
        return Content(self.text, tuple(np.array(array) for array in self.arrays))

    @property
    def nbytes(self) -> int:
        return len(self.text) + sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A serialized group: JSON text and arrays. It is serialized once, and every checkpoint writes it as is.

    A record loaded from a checkpoint reads its content from the file on demand.
    """

    group_index: int
    attempts: int
    oldest: int | None
    """See `oldest_version`."""
    body: Body
    saved: Body
    """The content to save in checkpoints. Differs from `body` if a text is too long (`with_bounded_text`)."""

    @classmethod
    def of(cls, group: Group, *, finished: bool = False) -> GroupRecord:
        """Packs and serializes a group. `finished`: no grader will read its texts again.

        Raises `DataError` if the group is not JSON-serializable.
        """
        group.pack()
        body = saved = _content(group, group.samples)
        bounded = [with_bounded_text(sample, finished) for sample in group.samples]
        if any(one is not two for one, two in zip(bounded, group.samples, strict=True)):
            saved = _content(group, bounded)
        return cls(group.group_index, group.attempts, oldest_version(group), body, saved)

    def owned(self) -> GroupRecord:
        """Returns a copy that owns its arrays. Arrays from another process can be views into a larger message."""
        body = self.body.read().owned()
        return replace(self, body=body, saved=body if self.saved is self.body else self.saved.read().owned())

    def group(self) -> Group:
        """Deserializes the group. Raises `CheckpointError` if its checkpoint file cannot be read."""
        return self._of(self.body.read())

    def saved_group(self) -> Group:
        """Deserializes the group as saved in checkpoints. Raises the same errors as `group`."""
        return self._of(self.saved.read())

    def _of(self, content: Content) -> Group:
        samples = [_sample(parts, content.arrays) for parts in _read_json(zlib.decompress(content.text))]
        return Group(self.group_index, tuple(samples), self.attempts)


GroupOrRecord = Group | GroupRecord
"""A group or its record; many callers never need to deserialize the record."""


def group_of(group: GroupOrRecord) -> Group:
    """Returns the group, deserialized from its record if necessary. Raises the same errors as `GroupRecord.group`."""
    return group if isinstance(group, Group) else group.group()


def record_of(group: GroupOrRecord, *, finished: bool = False) -> GroupRecord:
    """Returns the record, serialized from the group if necessary. Raises the same errors as `GroupRecord.of`."""
    return GroupRecord.of(group, finished=finished) if isinstance(group, Group) else group


def _read_json(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # NaN, or an integer of more than 64 bits
        return json.loads(text)


def _content(group: Group, samples: Sequence[Sample]) -> Content:
    """Serializes the group with these samples. Raises the same errors as `GroupRecord.of`."""
    arrays: list[Numbers] = []
    try:
        texts = [fields_to_json(_fields(sample, arrays)) for sample in samples]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"group {group.group_index} cannot be saved in checkpoints, because it contains a value that is not JSON "
            f"({error}); store only plain numbers, strings, lists and dicts in the fields of samples"
        ) from error
    return Content(zlib.compress(b"[" + b",".join(texts) + b"]", LEVEL), tuple(arrays))


def _fields(sample: Sample, arrays: list[Numbers]) -> dict[str, Any]:
    """Returns the fields of a sample for JSON, and appends its arrays to `arrays`."""

    def index_of(array: Numbers) -> int:
        arrays.append(array)
        return len(arrays) - 1

    fields = {**sample.held_fields(), "status": sample.status.value}
    for name in PER_TOKEN:
        if isinstance(column := fields[name], Column):
            counts = {} if column.counts is None else {"counts": index_of(column.counts)}
            fields[name] = {"values": index_of(column.values), **counts}
    experts = sample.rollout_routed_experts
    if experts is not None:
        fields[EXPERTS] = {"ids": index_of(experts.ids.reshape(-1)), "shape": experts.ids.shape, "start": experts.start}
    return fields


def _sample(fields: dict[str, Any], arrays: tuple[Numbers, ...]) -> Sample:
    """Inverts `_fields`."""
    for name in PER_TOKEN:
        if isinstance(where := fields.get(name), dict):
            counts = arrays[where["counts"]] if "counts" in where else None
            fields[name] = Column(arrays[where["values"]], counts)
    experts = fields.pop(EXPERTS)
    sample = Sample.from_dict({**fields, EXPERTS: None})
    if experts is not None:
        sample.rollout_routed_experts = RoutedExperts(
            arrays[experts["ids"]].reshape(experts["shape"]), experts["start"]
        )
    return sample


# ---- unsettled groups --------------------------------------------------------------------------------------------
BLANK = PromptRow(prompt="", prompt_tokens=None, label=None, metadata={}, source="")
"""Placeholder prompt when there is no dataset. The rollout function replaces it."""


@dataclass(frozen=True, slots=True)
class Origin:
    row: int | None
    """Index of the dataset row; None without a dataset."""
    first_index: int
    num_executions: int


@dataclass(frozen=True, slots=True)
class Issued:
    """A group in flight, in the state in which it was issued."""

    attempts: int
    record: GroupRecord | None
    """The group's record. None for a new group, which can be recreated from its origin."""


def make_group(row: PromptRow, group_index: int, origin: Origin, attempts: int) -> Group:
    """Creates a new group. Its samples share no mutable state."""
    samples = [
        Sample(
            group_index=group_index,
            index=origin.first_index + i,
            prompt=copy.deepcopy(row.prompt),
            tokens=list(row.prompt_tokens or ()),
            images=list(row.images),
            label=copy.deepcopy(row.label),
            metadata=copy.deepcopy(dict(row.metadata)),
        )
        for i in range(origin.num_executions)
    ]
    return Group(group_index=group_index, samples=tuple(samples), attempts=attempts)


def num_quarantines(group: Group) -> int:
    return max(s.num_quarantined for s in group.samples)


def note_quarantines(group: Group, times: int) -> Group:
    """Stores the number of quarantines in the samples, so that it is saved."""
    for sample in group.samples if times else ():
        sample.num_quarantined = times
    return group
