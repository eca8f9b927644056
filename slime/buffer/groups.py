"""Small pure operations on groups: nests, ids, starting over, age, and the contract of a user's buffer filter."""

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
"""Characters of one response's text that a checkpoint holds; a million tokens are rarely more."""
BufferFilter = Callable[[list[list[Sample]], int], list[list[Sample]]]
"""`(buffered groups, n) -> at most n groups to issue`; removes what it takes, or drops, from the list in place."""


def apply_filter(buffer_filter: BufferFilter, queue: Sequence[Group], n: int) -> tuple[list[Group], list[Group]]:
    """Runs a user's buffer filter; returns the groups it chose and those it left. What is in neither was dropped.

    Raises `LedgerError` if it takes more than `n`, invents a group, or leaves in the list what it took.
    """
    by_index = {group.group_index: group for group in queue}
    left = [list(group.samples) for group in queue]
    chosen = [group_index_of(samples) for samples in buffer_filter(left, n)]
    kept = [group_index_of(samples) for samples in left]
    both = chosen + kept
    if len(chosen) > n or len(set(both)) < len(both) or not set(both) <= set(by_index):
        raise LedgerError(
            f"got groups {chosen} from the buffer filter, which leaves {kept} of {sorted(by_index)}, because it must "
            f"take at most {n} and remove what it takes from the list in place; do: correct --buffer-filter-path"
        )
    return [by_index[index] for index in chosen], [by_index[index] for index in kept]


def flatten(nest: Sequence[Any]) -> list[Sample]:
    """The samples of a nest of lists, in order."""
    return [s for item in nest for s in (flatten(item) if isinstance(item, list | tuple) else [item])]


def group_index_of(samples: Sequence[Sample]) -> int:
    """The prompt id that all samples share. Raises `DataError` if they share none."""
    found = {s.group_index for s in samples}
    index = next(iter(found), None)
    if len(found) != 1 or index is None:
        raise DataError(f"got a group whose samples have group_index {sorted(map(str, found))}; they must share one")
    return index


def reset(sample: Sample) -> Sample:
    """The sample as it was before any generation."""
    metadata = {k: v for k, v in sample.metadata.items() if k != TURN_COUNTS}
    return dataclasses.replace(
        sample,
        tokens=sample.tokens[: sample.prompt_length],
        response="",
        response_length=0,
        loss_mask=None,
        rollout_log_probs=None,
        token_versions=None,
        teacher_log_probs=None,
        rollout_routed_experts=None,
        reward=None,
        status=Status.PENDING,
        failure="",
        unscored="",
        ungradable="",
        started_version=None,
        remove_sample=False,
        metadata=metadata,
    )


def reset_group(group: Group) -> Group:
    """The group before any generation: the first sample of each execution, reset."""
    first = {s.index: s for s in reversed(group.samples)}
    return group.with_samples([reset(s) for s in reversed(first.values())])


def oldest_version(group: Group) -> int | None:
    """Of the weights that its oldest token was sampled with; None without a sampled token."""
    return min((v for s in group.samples for v in s.weight_versions), default=None)


def with_bounded_text(sample: Sample, finished: bool) -> Sample:
    """The sample as a checkpoint holds it: text beyond `MAX_SAVED_TEXT` is truncated once no grader will read it.

    That is in scored samples, and in all of a `finished` group. Others would be graded, or continued, with a part of
    their text: they start over after a resume.
    """
    if len(sample.response) <= MAX_SAVED_TEXT:
        return sample
    logger.warning("checkpoint: truncated a text of %d characters of sample %s", len(sample.response), sample.index)
    bounded = sample.copy()  # whoever reads a field of the live one would have it hold lists
    bounded.response = sample.response[:MAX_SAVED_TEXT]
    return bounded if finished or sample.reward is not None else reset(bounded)


# `GroupRecord`: a group as the Data Buffer keeps it, and as a checkpoint holds it: text and arrays.
#
# The numbers of its samples are arrays (`Sample.pack`), everything else is JSON, compressed. A record is made once,
# when its group comes or is issued; checkpoints write it as it is. One that was read from a checkpoint reads its own
# part of the file when its group is wanted.
#
# Invariants
# 1. A record does not change; its group, and whoever works on that, shares nothing with it that is written to.
# 2. `GroupRecord.of(group).group()` is equal to the group.

LEVEL = 1
"""Of zlib: the texts of answers come to less than half, at 60 MB/s."""
EXPERTS = "rollout_routed_experts"


class Body(Protocol):
    """Where the text and the arrays of a record are."""

    def read(self) -> Content: ...


@dataclass(frozen=True, slots=True)
class Content:
    """A record's text and arrays, in memory."""

    text: bytes
    """JSON of the group, compressed. In the place of an array stands its number, of runs those of values and counts."""
    arrays: tuple[Numbers, ...]

    def read(self) -> Content:
        return self

    def owned(self) -> Content:
        """The same with arrays of its own."""
        return Content(self.text, tuple(np.array(array) for array in self.arrays))

    @property
    def nbytes(self) -> int:
        return len(self.text) + sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """What the buffer has to know of a group that waits, and the group itself."""

    group_index: int
    attempts: int
    oldest: int | None
    """Version of the weights that its oldest token was sampled with; None without a sampled token."""
    body: Body
    saved: Body
    """What a checkpoint holds; the same, unless a text is too long for that (`with_bounded_text`)."""

    @classmethod
    def of(cls, group: Group, *, finished: bool = False) -> GroupRecord:
        """Packs the samples of a group and records it. `finished`: no grader will read its texts again.

        Raises `DataError` if a user put anything but JSON into it.
        """
        group.pack()
        body = saved = _content(group, group.samples)
        bounded = [with_bounded_text(sample, finished) for sample in group.samples]
        if any(one is not two for one, two in zip(bounded, group.samples, strict=True)):
            saved = _content(group, bounded)
        return cls(group.group_index, group.attempts, oldest_version(group), body, saved)

    def owned(self) -> GroupRecord:
        """The same with arrays of its own: those that came from another process may be views of what brought them."""
        body = self.body.read().owned()
        return replace(self, body=body, saved=body if self.saved is self.body else self.saved.read().owned())

    def group(self) -> Group:
        """A group of its own. Raises `CheckpointError` if its part of a checkpoint cannot be read."""
        return self._of(self.body.read())

    def saved_group(self) -> Group:
        """The group as a checkpoint holds it. Raises as `group`."""
        return self._of(self.saved.read())

    def _of(self, content: Content) -> Group:
        samples = [_sample(parts, content.arrays) for parts in _read_json(zlib.decompress(content.text))]
        return Group(self.group_index, tuple(samples), self.attempts)


Held = Group | GroupRecord
"""A group, or its record: who only hands it on, or wants to know what the record tells, need not unpack it."""


def group_of(held: Held) -> Group:
    """The group itself. Raises as `GroupRecord.group`."""
    return held if isinstance(held, Group) else held.group()


def record_of(held: Held, *, finished: bool = False) -> GroupRecord:
    """The record of it. Raises as `GroupRecord.of`."""
    return GroupRecord.of(held, finished=finished) if isinstance(held, Group) else held


def _read_json(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # NaN, or a whole number of more than 64 bits
        return json.loads(text)


def _content(group: Group, samples: Sequence[Sample]) -> Content:
    """Of a group with these samples. Raises as `GroupRecord.of`."""
    arrays: list[Numbers] = []
    try:
        texts = [fields_to_json(_parts(sample, arrays)) for sample in samples]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"got group {group.group_index} holding something that is not JSON ({error}), because the buffer is "
            "part of every checkpoint; do: keep plain numbers, strings, lists and dicts in the fields of samples"
        ) from error
    return Content(zlib.compress(b"[" + b",".join(texts) + b"]", LEVEL), tuple(arrays))


def _parts(sample: Sample, arrays: list[Numbers]) -> dict[str, Any]:
    """The fields of a sample as JSON; its arrays go to the end of `arrays`."""

    def kept(array: Numbers) -> int:
        arrays.append(array)
        return len(arrays) - 1

    fields = {**sample.held_fields(), "status": sample.status.value}
    for name in PER_TOKEN:
        if isinstance(column := fields[name], Column):
            counts = {} if column.counts is None else {"counts": kept(column.counts)}
            fields[name] = {"values": kept(column.values), **counts}
    experts = sample.rollout_routed_experts
    if experts is not None:
        fields[EXPERTS] = {"ids": kept(experts.ids.reshape(-1)), "shape": experts.ids.shape, "start": experts.start}
    return fields


def _sample(fields: dict[str, Any], arrays: tuple[Numbers, ...]) -> Sample:
    """What `_parts` took apart."""
    for name in PER_TOKEN:
        if isinstance(where := fields[name], dict):
            counts = arrays[where["counts"]] if "counts" in where else None
            fields[name] = Column(arrays[where["values"]], counts)
    experts = fields.pop(EXPERTS)
    sample = Sample.from_dict({**fields, EXPERTS: None})
    if experts is not None:
        sample.rollout_routed_experts = RoutedExperts(
            arrays[experts["ids"]].reshape(experts["shape"]), experts["start"]
        )
    return sample


# What the Data Buffer remembers of a group: where it came from, how it was when issued, how often quarantined.

BLANK = PromptRow(prompt="", prompt_tokens=None, label=None, metadata={}, source="")
"""The prompt of every group when there is no dataset: the rollout function makes its own."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a group is made from; enough to make it again."""

    row: int | None
    """Dataset row; None without a dataset."""
    first_index: int
    num_executions: int


@dataclass(frozen=True, slots=True)
class Issued:
    """A group in flight, as it was when issued. A record, because the rollout works on the samples in place."""

    attempts: int
    record: GroupRecord | None
    """None: it was new, and its origin says it all."""


def make_group(row: PromptRow, group_index: int, origin: Origin, attempts: int) -> Group:
    """A group as it starts; every sample owns its containers."""
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
    """How often the group was quarantined."""
    return max(s.num_quarantined for s in group.samples)


def note_quarantines(group: Group, times: int) -> Group:
    """Writes it into the samples, where it is saved with them."""
    for sample in group.samples if times else ():
        sample.num_quarantined = times
    return group
