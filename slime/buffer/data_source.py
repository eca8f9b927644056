"""The Data Buffer for a source that produces samples itself (`sources.SampleSource` or a `--data-source-path` class).

The source stores returned groups and decides when to serve them again. The buffer manages the ids, the ledger and the
groups in flight. It calls the source while holding its lock, so a slow source blocks other calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.groups import GroupOrRecord, GroupRecord, flatten, group_index_of, group_of
from slime.buffer.snapshot import SavedState
from slime.buffer.sources import SampleSource
from slime.core.errors import DataError, HookError, LedgerError
from slime.core.sample import Group

METHODS = ("get_samples", "add_samples", "save", "load", "__len__")
"""Methods that a user's class must define. It need not derive from `SampleSource`."""


class DataSourceBuffer(DataBuffer):
    """A `DataBuffer` that gets new groups from a user's source and stores returned ones there.

    A group from the source must be new (ids None, or higher than all known ids) or one that was returned to the source.
    Any other group raises a `LedgerError`.
    """

    def __init__(self, source: SampleSource) -> None:
        """Raises `HookError` if a method of `source` is missing."""
        if missing := [name for name in METHODS if not callable(getattr(source, name, None))]:
            raise HookError(f"the data source {type(source).__name__} lacks {missing}; define all of {METHODS}")
        super().__init__(None)
        self._source = source
        self._lent: dict[int, int] = {}
        self._saved_at: int | None = None

    def _new_groups(self, n: int) -> list[Group]:
        if n == 0:
            return []
        nests = self._source.get_samples(n)
        if len(nests) != n:
            raise DataError(
                f"{type(self._source).__name__}.get_samples must return exactly {n} groups, got {len(nests)}"
            )
        groups = [self._receive(nest) for nest in nests]
        for group, record in groups:
            self._issue(group, record)
        return [group for group, _ in groups]

    def _receive(self, nest: Sequence[Any]) -> tuple[Group, GroupRecord]:
        samples = flatten(nest)
        if {s.group_index for s in samples} == {None}:
            return self._adopt(nest)
        index = group_index_of(samples)
        if index in self._lent:
            again = Group(group_index=index, samples=tuple(samples), attempts=self._lent[index])
            record = GroupRecord.of(again)
            del self._lent[index]
            return again, record
        if index < self._account.next_group_index:
            raise LedgerError(
                f"the data source returned group {index}, which was already issued and not put back; get_samples must "
                "return each group once, with increasing ids or None"
            )
        executions = [s.index for s in samples if s.index is not None]
        if len(executions) != len(samples) or min(executions) < self._account.next_index:
            raise LedgerError(
                f"the data source returned group {index} with execution ids {executions}; for a new group, get_samples "
                "must set the ids of all samples to None, or to ids higher than all known ones"
            )
        group = Group(group_index=index, samples=tuple(samples))
        record = GroupRecord.of(group)  # can raise, so serialize before counting the group
        self._account.add_foreign_group(index, max(executions))
        return group, record

    def _keep(self, groups: Sequence[tuple[GroupOrRecord, GroupRecord]]) -> None:
        self._lent.update({group.group_index: group.attempts for group, _ in groups})
        self._source.add_samples([list(group_of(group).samples) for group, _ in groups])

    def _is_buffered(self, group_index: int) -> bool:
        return group_index in self._lent or super()._is_buffered(group_index)

    def __len__(self) -> int:
        return len(self._source)

    @property
    def num_buffered(self) -> int:
        return super().num_buffered + len(self._lent)

    def _figures(self) -> dict[str, Any]:
        return {**super()._figures(), "lent": [list(item) for item in self._lent.items()], "saved_at": self._saved_at}

    def _load(self, saved: SavedState) -> None:
        self._lent = {index: attempts for index, attempts in saved.state["lent"]}
        self._saved_at = saved.state["saved_at"]
        super()._load(saved)

    def begin_save(self, path: Path, *, rollout_id: int | None = None) -> Callable[[], None]:
        """Takes a snapshot, and calls the source's `save(rollout_id)` under the same lock.

        Raises `DataError` without a `rollout_id`.
        """
        if rollout_id is None:
            raise DataError("a custom data source saves its state by step and needs a rollout_id, got None")
        with self._lock:
            self._saved_at = rollout_id
            write = super().begin_save(path)
            self._source.save(rollout_id)
        return write

    def load(self, path: Path, *, rollout_id: int | None = None) -> None:
        """Restores the state from `path`, then calls the source's `load` with the step of that save."""
        super().load(path, rollout_id=rollout_id)
        self._source.load(self._saved_at if rollout_id is None else rollout_id)


def behind_buffer(source: SampleSource, buffer_filter: object = None) -> DataBuffer:
    """Creates the buffer for a source that produces samples.

    Raises `HookError` with `--buffer-filter-path`, unless the source has an attribute `buffer_filter`, with which it
    filters its own buffer.
    """
    if buffer_filter is not None and getattr(source, "buffer_filter", None) is None:
        raise HookError(
            "--buffer-filter-path has no effect with a custom data source, which chooses groups in get_samples; drop "
            "it, or derive the source from slime.rollout.data_source.RolloutDataSourceWithBuffer"
        )
    return DataSourceBuffer(source)
