"""What the Data Buffer remembers of a group: where it came from, how it was when issued, how often quarantined."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from slime.buffer.records import GroupRecord
from slime.core.sample import Group, PromptRow, Sample

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
