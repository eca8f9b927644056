"""Writes one sender's files of a version and keeps the sender's tensors in host memory as the base of the next delta.

A full version is a Hugging Face folder with one safetensors file per bucket. A delta has one file per sender, which
contains the concatenated patches of all changed tensors. File names contain the sender's rank to keep them unique.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from slime.core.cores import usable_cores
from slime.core.errors import WeightSyncError
from slime.core.files import full_disk_named, open_to_readers, sync_to_disk
from slime.weights.delta import encodings
from slime.weights.delta.encodings import Bytes
from slime.weights.delta.folder import Entry, Report, checksum, places, width_of

if TYPE_CHECKING:
    from torch import Tensor

MOST_THREADS = 8
"""Maximum number of threads for encoding tensors."""


@dataclass(slots=True)
class Held:
    """The most recently sent value of a tensor."""

    data: Bytes
    """The tensor's bytes, [num_bytes]."""
    dtype: str
    shape: tuple[int, ...]


Memory = dict[str, Held]
"""All tensors of a sender, by name."""


class VersionWriter:
    """Writes one sender's files of one version."""

    def __init__(
        self, folder: Path, memory: Memory | None, *, rank: int, full: bool, encoding: str, checksum: str
    ) -> None:
        """`folder`: the version's temporary folder. It is created if needed, and files left by this sender's earlier
        attempts are deleted. `memory`: tensors of the previous version, which `add` updates, or None if deltas are not
        used.
        """
        assert full or memory is not None, "a delta needs the previous version"
        self._folder, self._memory, self._rank, self._full = folder, memory, rank, full
        self._encoding, self._checksum = encoding, checksum
        self._entries: list[Entry] = []
        self._num_files = self._num_elements = self._num_changed = self._size = 0
        self._file: IO[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"*-r{rank:05d}[-.]*"):
            old.unlink()

    def add(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Writes a bucket. Raises `WeightSyncError` if a tensor differs from its base in dtype or shape."""
        with full_disk_named(self._folder.parent):
            if self._full:
                self._add_whole(tensors)
            else:
                self._add_changes(tensors)

    def report(self) -> Report:
        """Flushes this sender's files to disk and returns its report."""
        if self._file is not None:
            with full_disk_named(self._folder.parent):
                self._file.flush()
                os.fsync(self._file.fileno())
        self.close()
        return Report(tuple(self._entries), self._num_elements, self._num_changed)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add_whole(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        from safetensors.torch import save_file

        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
        self._num_files += 1
        file = self._folder / f"model-r{self._rank:05d}-{self._num_files:05d}.safetensors"
        save_file(on_host, file, metadata={"format": "pt"})
        open_to_readers(file)
        sync_to_disk(file)
        for name, place in places(file).items():
            data = flat_bytes(on_host[name])
            found = checksum(self._checksum, data)
            at = (encodings.RAW, file.name, place.offset, place.num_bytes)
            self._entries.append(Entry(name, place.dtype, place.shape, place.num_bytes, *at, found, found))
            self._num_elements += on_host[name].numel()
            self._num_changed += on_host[name].numel()
            if self._memory is not None:
                self._memory[name] = Held(data.copy(), place.dtype, place.shape)

    def _add_changes(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        with ThreadPoolExecutor(min(MOST_THREADS, usable_cores()), thread_name_prefix="weights-delta") as pool:
            for name, tensor in tensors:
                self._require_same(name, tensor)
            on_host = [(name, tensor.detach().cpu().contiguous()) for name, tensor in tensors]
            for entry, patch, num_changed in pool.map(lambda one: self._changed(*one), on_host):
                self._num_changed += num_changed
                if patch:
                    self._append(entry, patch)
        self._num_elements += sum(tensor.numel() for _, tensor in on_host)

    def _require_same(self, name: str, tensor: Tensor) -> None:
        held = self._memory.get(name) if self._memory is not None else None
        if (
            held is None
            or held.shape != tuple(tensor.shape)
            or len(held.data) != tensor.numel() * tensor.element_size()
        ):
            was = "nothing" if held is None else f"{held.dtype} {held.shape}"
            raise WeightSyncError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, but its base is {was}; send a full version"
            )

    def _changed(self, name: str, tensor: Tensor) -> tuple[dict[str, Any], bytes, int]:
        """Returns the entry's fields, the patch (empty if nothing changed) and the number of changed elements."""
        assert self._memory is not None, "a delta needs the previous version"
        held, data, encoding = self._memory[name], flat_bytes(tensor), self._encoding
        patch, num_changed = encodings.encode(encoding, held.data, data, width_of(held.dtype))
        if len(patch) >= len(data) > 0:
            patch, encoding = data.tobytes(), encodings.RAW
        said: dict[str, Any] = {}
        if patch:
            held.data[:] = data
            said = {
                "name": name,
                "dtype": held.dtype,
                "shape": held.shape,
                "num_bytes": len(data),
                "encoding": encoding,
                "patch_checksum": checksum(self._checksum, patch),
                "tensor_checksum": checksum(self._checksum, held.data),
            }
        return said, patch, num_changed

    def _append(self, said: dict[str, Any], patch: bytes) -> None:
        if self._file is None:
            self._file = (self._folder / f"delta-r{self._rank:05d}.bin").open("wb")
        offset = self._size
        self._file.write(patch)
        self._size += len(patch)
        self._entries.append(Entry(**said, file=Path(self._file.name).name, offset=offset, size=len(patch)))


def flat_bytes(tensor: Tensor) -> Bytes:
    """Returns a contiguous host tensor's bytes as a view [num_bytes]."""
    import torch

    found: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return found
