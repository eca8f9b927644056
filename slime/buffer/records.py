"""`GroupRecord`: a group as the Data Buffer keeps it, and as a checkpoint holds it: text and arrays.

The numbers of its samples are arrays (`Sample.pack`), everything else is JSON, compressed. A record is made once, when
its group comes or is issued; checkpoints write it as it is. One that was read from a checkpoint reads its own part of
the file when its group is wanted.

Invariants
1. A record does not change; its group, and whoever works on that, shares nothing with it that is written to.
2. `GroupRecord.of(group).group()` is equal to the group.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import orjson

from slime.buffer.groups import oldest_version, with_bounded_text
from slime.core.columns import Column, Numbers
from slime.core.errors import DataError
from slime.core.routed_experts import RoutedExperts
from slime.core.sample import PER_TOKEN, Group, Sample, fields_to_json

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
