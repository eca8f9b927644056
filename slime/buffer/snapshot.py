"""The saved state of the Data Buffer: a snapshot and its files.

    data_buffer.json                     the ledger, and which groups are queued, finished or in flight
    data_buffer.<save>.1.safetensors     the records of these groups (text and arrays); further files are 2, 3, ...

Taking a snapshot is fast, because groups are already serialized, and any thread can write it. The record files are
flushed to disk before the JSON that names them is written; then the files of earlier saves are deleted. Records are
loaded lazily.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from slime.buffer.groups import Content, GroupRecord, Issued
from slime.core.columns import Numbers
from slime.core.errors import CheckpointError
from slime.core.files import sync_to_disk, write_json
from slime.core.sample import Group

FORMAT = 2
"""Version of the saved state. Format 1 is still supported and stores the groups in the JSON."""
MOST_BYTES = 256 * 2**20
"""Maximum size of a record file, unless a single record is larger. Writing needs this much memory."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the buffer at one point in time. Shares no mutable state with the live buffer."""

    figures: Mapping[str, Any]
    """The dataset position, the counters and the weight version."""
    buffered: Sequence[GroupRecord]
    finished: Sequence[GroupRecord]
    """Groups waiting to be trained."""
    in_flight: Sequence[tuple[int, Issued]]
    """(`group_index`, group) of each group in flight, in the order in which they were issued."""

    def plain(self) -> dict[str, Any]:
        """Returns the state as a single JSON-serializable dict, in format 1."""
        return {"format": 1, **self._state("group", lambda record: record.saved_group().to_dict())}

    def _state(self, entry: str, describe: Callable[[GroupRecord], Any]) -> dict[str, Any]:
        """Returns the figures and the groups, converted with `describe`. `entry` is the key for groups in flight."""
        in_flight = [
            {
                "group_index": index,
                "attempts": one.attempts,
                entry: None if one.record is None else describe(one.record),
            }
            for index, one in self.in_flight
        ]
        waiting = {"buffered": self.buffered, "finished": self.finished}
        groups = {name: [describe(record) for record in records] for name, records in waiting.items()}
        return {**self.figures, **groups, "in_flight": in_flight}

    def write(self, path: Path) -> None:
        """Writes the record files, then the JSON at `path`, and flushes them to disk."""
        path.parent.mkdir(parents=True, exist_ok=True)
        issued = [one.record for _, one in self.in_flight if one.record is not None]
        records = [*self.buffered, *self.finished, *issued]
        save = f"{path.stem}.{secrets.token_hex(4)}"
        names = (path.with_name(f"{save}.{number}.safetensors") for number in count(1))
        files = [_write(name, tensors) for name, tensors in zip(names, _in_files(records))]  # noqa: B905
        state = {"format": FORMAT, **self._state("record", _described), "files": files}
        write_json(path, state)
        for earlier in set(path.parent.glob(f"{path.stem}.*.safetensors")) - {path.with_name(name) for name in files}:
            earlier.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved state of either format, with groups as records."""

    state: Mapping[str, Any]
    buffered: list[GroupRecord]
    finished: list[GroupRecord]
    in_flight: list[tuple[int, Issued]]

    @classmethod
    def of(cls, state: Mapping[str, Any], path: Path | None = None) -> SavedState:
        """Reads a state of format 1, or of format 2 with its files next to `path`. Raises `CheckpointError`."""
        if state.get("format") not in (1, FORMAT):
            raise CheckpointError(
                f"the buffer state has format {state.get('format')}, but this version of slime supports only 1 and "
                f"{FORMAT}; resume with the version that saved it"
            )
        read: Callable[[Mapping[str, Any]], GroupRecord] = _of_group
        if state["format"] == FORMAT:
            if path is None:
                raise CheckpointError(
                    "the records of a buffer state are in files next to its JSON; pass the path of the JSON"
                )
            read = _Files([path.with_name(name) for name in state["files"]]).record
        entry = "record" if state["format"] == FORMAT else "group"
        issued = [
            (one["group_index"], Issued(one["attempts"], None if one[entry] is None else read(one[entry])))
            for one in state["in_flight"]
        ]
        return cls(state, [read(g) for g in state["buffered"]], [read(g) for g in state.get("finished", ())], issued)


def _of_group(group: Mapping[str, Any]) -> GroupRecord:
    return GroupRecord.of(Group.from_dict(dict(group)))


def _described(record: GroupRecord) -> dict[str, Any]:
    return {"group_index": record.group_index, "attempts": record.attempts, "oldest": record.oldest}


def _in_files(records: Sequence[GroupRecord]) -> Iterator[dict[str, Numbers]]:
    """Splits the records into files. Yields the tensors of each."""
    tensors: dict[str, Numbers] = {}
    size = 0
    for record in records:
        content = record.saved.read()
        if tensors and size + content.nbytes > MOST_BYTES:
            yield tensors
            tensors, size = {}, 0
        size += content.nbytes
        tensors[f"{record.group_index}"] = np.frombuffer(content.text, np.uint8)
        tensors |= {f"{record.group_index}.{i}": array for i, array in enumerate(content.arrays)}
    if tensors:
        yield tensors


def _write(path: Path, tensors: dict[str, Numbers]) -> str:
    """Writes one record file and returns its name."""
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path)
    sync_to_disk(path)
    return path.name


@dataclass(frozen=True)
class _Files:
    """The open record files of a saved state. They stay readable even if the checkpoint is pruned."""

    paths: Sequence[Path]
    handles: dict[str, Any] = field(default_factory=dict)
    """Tensor name -> open file."""

    def __post_init__(self) -> None:
        for path in self.paths:
            with _readable(path):
                handle = safe_open(path, framework="np")
                self.handles.update(dict.fromkeys(handle.keys(), handle))

    def record(self, described: Mapping[str, Any]) -> GroupRecord:
        name = str(described["group_index"])
        if name not in self.handles:
            raise CheckpointError(
                f"the record of group {name} is missing from {[str(p) for p in self.paths]}; load an earlier checkpoint"
            )
        body = _OnDisk(self, name)
        return GroupRecord(body=body, saved=body, **described)

    def read(self, name: str) -> Content:
        with _readable(*self.paths):
            arrays: list[Numbers] = []
            while (one := f"{name}.{len(arrays)}") in self.handles:
                arrays.append(self.handles[one].get_tensor(one))
            return Content(self.handles[name].get_tensor(name).tobytes(), tuple(arrays))


@dataclass(frozen=True, slots=True)
class _OnDisk:
    files: _Files
    name: str

    def read(self) -> Content:
        return self.files.read(self.name)


@contextlib.contextmanager
def _readable(*paths: Path) -> Iterator[None]:
    """Converts errors from a damaged or missing file to `CheckpointError`."""
    try:
        yield
    except (OSError, SafetensorError, ValueError) as error:
        names = ", ".join(map(str, paths))
        raise CheckpointError(
            f"the checkpoint is incomplete: the records in {names} cannot be read ({error}); load an earlier checkpoint"
        ) from error


def check_dataset(state: Mapping[str, Any], *, has_walk: bool) -> None:
    """Raises `CheckpointError` if only one of this run and the saved run has a dataset."""
    if (state["walk"] is not None) != has_walk:
        has, missing = ("this run", "the saved one") if has_walk else ("the saved run", "this one")
        raise CheckpointError(f"{has} has a dataset, but {missing} has none; resume with the same data settings")
