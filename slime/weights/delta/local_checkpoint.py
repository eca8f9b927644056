"""The local checkpoint that the engines of a host load. It holds one complete version and is patched in place.

    state.json      the current version and the checksum of each tensor; absent while files change
    model/          a Hugging Face folder
    lock            held exclusively to change files, shared to load them; a host's agents can share a folder

`LocalCheckpoint` copies or applies versions from the shared folder to `model/` while it holds the lock. The kernel
releases the lock when the process exits.

Invariants
1. `state.json` is deleted (and the deletion flushed) before the first byte changes, and written after the last changed
   byte is on disk. So files that a killed process left half-changed never count as a version.
2. A patch is applied only if its checksum is correct. If the patched tensor's checksum is wrong, the checkpoint is left
   without a state.
3. If deltas cannot be applied, the newest full version is copied and the later deltas are applied to the copy. If the
   checkpoint is already at the target version, all its checksums are verified, because nothing else would detect
   damage.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from slime.core.cores import usable_cores
from slime.core.errors import WeightSyncError
from slime.core.files import full_disk_named, sync_to_disk, write_json
from slime.core.text import listed
from slime.weights.delta import encodings
from slime.weights.delta.encodings import Bytes
from slime.weights.delta.folder import (
    MANIFEST,
    Base,
    Entry,
    Manifest,
    checksum,
    folder_of,
    places,
    read_json,
    steps_to,
    tensor_checksums,
    whole_checksum,
    width_of,
)

logger = logging.getLogger(__name__)

MOST_THREADS = 8
"""Maximum number of threads for decoding and verifying tensors."""
SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class State:
    """The version that the local checkpoint holds."""

    version: int
    digest: str
    """Digest of the version's manifest."""
    tensors: Mapping[str, str]
    """Tensor name -> checksum."""


@dataclass(frozen=True, slots=True)
class WorkDone:
    """What one call of `LocalCheckpoint.bring_to` did."""

    full: int
    """Number of full versions copied."""
    deltas: int
    """Number of deltas applied."""
    num_bytes: int
    """Total size of the patches read."""


class _Damaged(WeightSyncError):
    """The local checkpoint does not match `state.json` and must be copied again."""


class LocalCheckpoint:
    """A checkpoint in `folder` that tracks the versions in the trainer's folder `source`."""

    def __init__(self, folder: Path, source: Path, note: Callable[[str], object] = lambda doing: None) -> None:
        """`note`: called with a description of each task before it starts."""
        self._folder, self._source, self._note = folder, source, note
        self.model = folder / "model"
        """The folder that engines load from."""
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def state(self) -> State | None:
        """The current state, or None if the checkpoint is incomplete."""
        found = read_json(self._folder / "state.json")
        if found is None:
            return None
        try:
            return State(int(found["version"]), str(found["digest"]), dict(found["tensors"]))
        except (KeyError, TypeError, ValueError):
            return None

    def bring_to(self, target: Base) -> WorkDone:
        """Updates the checkpoint to `target`. After a `WeightSyncError`, it holds its previous version or has no
        state."""
        with self._locked(fcntl.LOCK_EX), full_disk_named(self._folder):
            state = self.state
            if state is not None:
                try:
                    return self._follow(target, state)
                except _Damaged as error:
                    logger.warning("%s: the local checkpoint is damaged, copying it again: %s", self._folder, error)
                except WeightSyncError as error:
                    logger.warning("%s: cannot continue from version %d: %s", self._folder, state.version, error)
            return self._follow(target, None)

    @contextmanager
    def reading(self) -> Iterator[Path]:
        """Yields the folder to load from, which does not change inside the block."""
        with self._locked(fcntl.LOCK_SH):
            yield self.model

    def _follow(self, target: Base, state: State | None) -> WorkDone:
        steps = steps_to(target, state.digest if state else None, self._read)
        if state is not None and not steps:
            self._require_intact(state)
        done = WorkDone(0, 0, 0)
        for manifest in steps:
            self._note(f"applying version {manifest.version}")
            self._forget()
            if manifest.base is None:
                tensors = self._copy(manifest)
            else:
                assert state is not None, "a chain begins with a full version or with a delta to the local one"
                tensors = self._apply(manifest, state.tensors)
            if whole_checksum(tensors) != manifest.whole:
                raise WeightSyncError(f"version {manifest.version} is incomplete; send a full version")
            state = State(manifest.version, manifest.digest, tensors)
            self._remember(state)
            size = sum(entry.size for entry in manifest.entries)
            is_full = manifest.base is None
            done = WorkDone(done.full + is_full, done.deltas + (not is_full), done.num_bytes + size)
        return done

    def _copy(self, manifest: Manifest) -> dict[str, str]:
        """Copies a full version, including files such as config and tokenizer."""
        folder = self._source / folder_of(manifest.version)
        shutil.rmtree(self.model, ignore_errors=True)
        self.model.mkdir()
        files = {entry.file for entry in manifest.entries}
        for file in sorted(folder.iterdir()):
            wanted = file.name in files or not file.name.endswith(SUFFIX)
            if file.is_file() and wanted and file.name != MANIFEST:
                self._note(f"copying {file.name} of version {manifest.version}")
                shutil.copyfile(file, self.model / file.name)
        with _Mapped(self.model, files, write=False) as mapped:
            self._side_by_side(manifest, lambda entry: _require_whole(manifest, entry, mapped.views[entry.file]))
        for name in files:
            sync_to_disk(self.model / name)
        sync_to_disk(self.model)
        return tensor_checksums(manifest.entries)

    def _apply(self, manifest: Manifest, tensors: Mapping[str, str]) -> dict[str, str]:
        """Applies a delta to the files in `model/`."""
        folder = self._source / folder_of(manifest.version)
        files = {file.name for file in self.model.glob(f"*{SUFFIX}")}
        where = {name: (file, place) for file in files for name, place in places(self.model / file).items()}
        patches = {entry.file: (folder / entry.file).open("rb") for entry in manifest.entries}
        try:
            with _Mapped(self.model, files, write=True) as mapped:

                def change(entry: Entry) -> None:
                    self._note(f"applying {entry.name} of version {manifest.version}")
                    if entry.name not in where:
                        raise _Damaged(f"the local checkpoint has no {entry.name}")
                    file, place = where[entry.name]
                    if (place.dtype, place.shape, place.num_bytes) != (entry.dtype, entry.shape, entry.num_bytes):
                        raise _Damaged(f"{entry.name} is {place} locally, but {entry.dtype} {entry.shape} in the delta")
                    data = mapped.views[file][place.offset : place.offset + place.num_bytes]
                    _change(manifest, entry, data, _patch(manifest, entry, patches[entry.file]))

                self._side_by_side(manifest, change)
        except OSError as error:
            raise WeightSyncError(f"version {manifest.version} cannot be read: {error}") from error
        finally:
            for opened in patches.values():
                opened.close()
        return {**tensors, **tensor_checksums(manifest.entries)}

    def _require_intact(self, state: State) -> None:
        """Raises `_Damaged` if a tensor's checksum differs from the one in `state`."""
        files = {file.name for file in self.model.glob(f"*{SUFFIX}")}
        kind = self._read(state.version).checksum
        with _Mapped(self.model, files, write=False) as mapped:
            held = {
                name: checksum(kind, mapped.views[file][place.offset : place.offset + place.num_bytes])
                for file in files
                for name, place in places(self.model / file).items()
            }
        if held != state.tensors:
            wrong = sorted(name for name in {*held, *state.tensors} if held.get(name) != state.tensors.get(name))
            raise _Damaged(f"the checksums of {listed(wrong, 3)} differ from version {state.version}")

    def _side_by_side(self, manifest: Manifest, do: Callable[[Entry], None]) -> None:
        with ThreadPoolExecutor(min(MOST_THREADS, usable_cores()), thread_name_prefix="weights-apply") as pool:
            for _ in pool.map(do, manifest.entries):
                pass

    def _read(self, version: int) -> Manifest:
        return Manifest.read(self._source / folder_of(version))

    def _forget(self) -> None:
        (self._folder / "state.json").unlink(missing_ok=True)
        sync_to_disk(self._folder)

    def _remember(self, state: State) -> None:
        content = {"version": state.version, "digest": state.digest, "tensors": dict(state.tensors)}
        write_json(self._folder / "state.json", content)

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        with (self._folder / "lock").open("a") as lock:
            fcntl.flock(lock, how)
            yield


class _Mapped:
    """Memory-maps files as flat bytes. Flushes changes to disk when the `with` block exits without an error."""

    def __init__(self, folder: Path, names: set[str], *, write: bool) -> None:
        self._folder, self._names, self._write = folder, names, write
        self.views: dict[str, Bytes] = {}
        self._maps: list[mmap.mmap] = []
        self._open: list[IO[bytes]] = []

    def __enter__(self) -> _Mapped:
        for name in self._names:
            opened = (self._folder / name).open("r+b" if self._write else "rb")
            self._open.append(opened)
            access = mmap.ACCESS_WRITE if self._write else mmap.ACCESS_READ
            self._maps.append(mmap.mmap(opened.fileno(), 0, access=access))
            self.views[name] = np.frombuffer(self._maps[-1], np.uint8)
        return self

    def __exit__(self, kind: Any, *rest: object) -> None:
        self.views.clear()
        for mapped in self._maps:
            if kind is None and self._write:
                mapped.flush()
            with contextlib.suppress(BufferError):  # a traceback still references a view; the map is closed with it
                mapped.close()
        for opened in self._open:
            opened.close()


def _require_whole(manifest: Manifest, entry: Entry, file: Bytes) -> None:
    """Raises `WeightSyncError` if a tensor of a full version is damaged."""
    data = file[entry.offset : entry.offset + entry.size]
    if entry.encoding != encodings.RAW or len(data) != entry.num_bytes:
        raise WeightSyncError(
            f"{entry.name} in version {manifest.version} is damaged: it has the wrong size ({len(data)} bytes)"
        )
    if not checksum(manifest.checksum, data) == entry.patch_checksum == entry.tensor_checksum:
        raise WeightSyncError(f"{entry.name} of version {manifest.version} is damaged: its checksum differs")


def _patch(manifest: Manifest, entry: Entry, file: IO[bytes]) -> bytes:
    patch = os.pread(file.fileno(), entry.size, entry.offset)
    if len(patch) != entry.size or checksum(manifest.checksum, patch) != entry.patch_checksum:
        raise WeightSyncError(
            f"the patch for {entry.name} in version {manifest.version} is damaged: its checksum differs"
        )
    return patch


def _change(manifest: Manifest, entry: Entry, data: Bytes, patch: bytes) -> None:
    if entry.encoding == encodings.RAW:
        if len(patch) != len(data):
            raise WeightSyncError(f"the patch for {entry.name} has {len(patch)} bytes, but the tensor has {len(data)}")
        data[:] = np.frombuffer(patch, np.uint8)
    elif len(data) % width_of(entry.dtype) == 0:
        encodings.apply(entry.encoding, data, patch, width_of(entry.dtype))
    if checksum(manifest.checksum, data) != entry.tensor_checksum:
        raise _Damaged(f"{entry.name} has the wrong checksum after applying version {manifest.version}")
