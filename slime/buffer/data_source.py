"""Sources that serve samples (`sources.SampleSource`, the class at `--data-source-path`) behind the Data Buffer.

Their own `add_samples` decides when returned work is served again; identity, ledger and what was in flight stay with
the buffer.

Consumes and produces: as `data_buffer`; new and returned groups go through the source's methods, which are called under
the buffer's lock. Waits for: what these methods wait for; nobody wakes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.groups import GroupRecord, Held, flatten, group_index_of, group_of
from slime.buffer.snapshot import SavedState
from slime.core.errors import DataError, HookError, LedgerError
from slime.core.sample import Group, Sample


@runtime_checkable
class Samples(Protocol):
    """What a user's class provides; `sources.SampleSource` has the same."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Exactly `num_samples` groups: lists of samples of one prompt. New ones may leave the ids None."""
        ...

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Takes groups back, partial work included; `get_samples` serves them again, their ids unchanged."""
        ...

    def save(self, rollout_id: int) -> None: ...

    def load(self, rollout_id: int | None = None) -> None: ...

    def __len__(self) -> int: ...


class DataSourceBuffer(DataBuffer):
    """A `DataBuffer` whose new prompts and returned groups live in a user's source.

    Adds one invariant: a group that the source serves is either new (ids None, or above all seen) or one that was
    given back to it; anything else is a `LedgerError`.
    """

    def __init__(self, source: Samples) -> None:
        """Raises `HookError` if `source` lacks a method."""
        if not isinstance(source, Samples):
            names = ("get_samples", "add_samples", "save", "load", "__len__")
            missing = [name for name in names if not callable(getattr(source, name, None))]
            raise HookError(f"got a data source {type(source).__name__} without {missing}; it needs {names}")
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
                f"got {len(nests)} of {n} groups from {type(self._source).__name__}.get_samples; it must give all"
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
                f"got group {index} from the data source, because it was issued before and not given back; do: let "
                "get_samples return each group once, with rising ids or None"
            )
        executions = [s.index for s in samples if s.index is not None]
        if len(executions) != len(samples) or min(executions) < self._account.next_index:
            raise LedgerError(
                f"got group {index} with execution ids {executions}; give rising ids to all samples or None"
            )
        group = Group(group_index=index, samples=tuple(samples))
        record = GroupRecord.of(group)  # first: it may not be JSON
        self._account.add_foreign_group(index, max(executions))
        return group, record

    def _keep(self, groups: Sequence[tuple[Held, GroupRecord]]) -> None:
        self._lent.update({held.group_index: held.attempts for held, _ in groups})
        self._source.add_samples([list(group_of(held).samples) for held, _ in groups])

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
        """Takes our account and calls the source's own `save(rollout_id)`, so that both are of one moment.

        Raises `DataError` without a `rollout_id`.
        """
        if rollout_id is None:
            raise DataError("got no rollout_id to save under, because a custom data source files its state by step")
        with self._lock:
            self._saved_at = rollout_id
            write = super().begin_save(path)
            self._source.save(rollout_id)
        return write

    def load(self, path: Path, *, rollout_id: int | None = None) -> None:
        """Restores our account from `path` and calls the source's own `load` with the step that it was saved under."""
        super().load(path, rollout_id=rollout_id)
        self._source.load(self._saved_at if rollout_id is None else rollout_id)


def behind_buffer(source: Samples, buffer_filter: object = None) -> DataBuffer:
    """The buffer over a source that serves samples. Raises `HookError` with a filter (`--buffer-filter-path`)."""
    if buffer_filter is not None:
        raise HookError("got --buffer-filter-path beside a data source of your own, which chooses in its get_samples")
    return DataSourceBuffer(source)
