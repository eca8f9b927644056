"""Reads a `torch_dist` folder or a pickled rollout as data (`inert`).

Raises `CheckpointError` if a file is damaged or needs more memory than its size justifies. A file crafted to exhaust
the C stack can crash the process, but can do nothing else.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from slime.core.errors import CheckpointError
from slime.core.text import one_line
from slime.training.foreign import inert

SPARE_BYTES = 4 << 30
"""Extra address space allowed while reading, on top of an amount proportional to the file size."""
_TENSORS, _OBJECTS = 4, 32
"""Bytes of memory allowed per byte of a file: for tensors, and for numbers that become Python objects."""
MAX_DEPTH = 200
VALUES_PER_BYTE, SPARE_VALUES = 4, 100_000
"""Limits on the number of values in a sample. Without repeated references, a pickle has at most one value per byte."""
_METADATA, _CHUNKS_HELD = ".metadata", 2
_Chunk: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], Any]"
"""(offsets, sizes, location in the files)."""


@contextmanager
def _limited(what: str, num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = [own + SPARE_BYTES + num_bytes, *(n for n in (soft, hard) if n != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    except Exception as error:  # a damaged or hostile file can raise anything
        reason = f"{error}" or type(error).__name__
        raise CheckpointError(
            f"{what} cannot be read: {one_line(reason, 600)}; download it again, or use a different file"
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Folder:
    """The index of a `torch_dist` folder. Tensors are read one at a time."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Name -> dtype and shape."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[tuple[str, int], Tensor] = {}
        self.tensors = {}
        self._chunks: dict[str, list[_Chunk]] = {}
        metadata = folder / _METADATA
        with _limited(str(metadata), _OBJECTS * metadata.stat().st_size), metadata.open("rb") as file:
            self._index(inert.load(file).fields)

    def _index(self, fields: dict[str, Any]) -> None:
        infos = {(i.fields["fqn"], i.fields.get("offset")): info for i, info in fields["storage_data"].items()}
        for key, stored in fields["state_dict_metadata"].items():
            if type(stored).__name__ != "TensorStorageMetadata":
                continue
            self.tensors[key] = (stored.fields["properties"].state[0], tuple(map(int, stored.fields["size"])))
            places = [(tuple(c.fields["offsets"]), tuple(c.fields["sizes"])) for c in stored.fields["chunks"]]
            self._chunks[key] = [(start, size, infos.get((key, start))) for start, size in dict(places).items()]

    def tensor(self, key: str, at: tuple[int, ...] = ()) -> Tensor:
        """Returns the tensor `key`, or its slice at indices `at` of the leading axes."""
        kind, size = self.tensors[key]
        with _limited(f"{key} in {self._folder}", _TENSORS * self._largest_file()):
            axes = len(at)
            out = torch.empty(size[axes:], dtype=kind)
            missing = out.numel()
            for start, length, info in self._chunks[key]:
                inside = [number - first for number, first in zip(at, start, strict=False)]
                if any(not 0 <= i < n for i, n in zip(inside, length, strict=False)):
                    continue
                part = self._chunk(info, kind, length)
                for number in inside:
                    part = part[number]
                target = out
                for axis, (first, num) in enumerate(zip(start[axes:], length[axes:], strict=True)):
                    target = target.narrow(axis, first, num)
                target.copy_(part)
                missing -= part.numel()
            if missing:
                raise ValueError(f"{missing} of its {out.numel()} values are missing")
        return out

    def _largest_file(self) -> int:
        return max(file.stat().st_size for file in self._folder.iterdir())

    def _chunk(self, info: Any, kind: torch.dtype, size: tuple[int, ...]) -> Tensor:
        """Reads one stored chunk. The most recent ones are cached, because one chunk can contain several experts."""
        fields = info.fields
        name, offset, length = fields["relative_path"], fields["offset"], fields["length"]
        if fields.get("transform_descriptors"):
            raise ValueError(f"{name} is compressed ({fields['transform_descriptors']}), which is not supported")
        if Path(name).name != name:
            raise ValueError(f"it is stored in {name}, outside the folder")
        if (name, offset) in self._held:
            return self._held[name, offset]
        with open(self._folder / name, "rb") as file:
            file.seek(offset)
            tensor = inert.tensor_of(file.read(length))
        if tensor.dtype != kind or tuple(tensor.shape) != size:
            raise ValueError(f"{name} contains {tensor.dtype} {tuple(tensor.shape)}, but the index has {kind} {size}")
        while len(self._held) >= _CHUNKS_HELD:
            self._held.pop(next(iter(self._held)))
        self._held[name, offset] = tensor
        return tensor


class Rollout:
    """A pickled rollout."""

    rollout_id: Any
    num_samples: int

    def __init__(self, path: Path) -> None:
        self._path, self._num_bytes = path, path.stat().st_size
        with self._limited(), path.open("rb") as file:
            held = inert.load_archive(file)
            if not isinstance(held, dict) or "samples" not in held:
                raise ValueError("it is not a rollout: expected a dict with the key 'samples'")
            self._samples = list(held["samples"])
        self.rollout_id, self.num_samples = held.get("rollout_id"), len(self._samples)

    def sample(self, number: int) -> Any:
        """Returns a sample's fields as JSON types. Reading frees the sample, so it can be read only once."""
        held, self._samples[number] = self._samples[number], None
        with self._limited():
            return _Plain(VALUES_PER_BYTE * self._num_bytes + SPARE_VALUES).of(held, f"sample {number}")

    def _limited(self) -> Any:
        return _limited(str(self._path), _OBJECTS * self._num_bytes)


class _Plain:
    """Converts a value to JSON types, up to a total of `most` values and characters.

    The limit guards against a small pickle that references one list many times. Errors name the path of the value.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def of(self, value: Any, where: str, depth: int = 0) -> Any:
        self._left -= 1 + (len(value) if isinstance(value, str) else 0)
        if self._left < 0 or depth > MAX_DEPTH:
            raise ValueError(f"{where} has over {self._most:,} values and characters or over {MAX_DEPTH} nested levels")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, dict):
            return {self.of(str(key), where): self.of(held, f"{where}.{key}", depth + 1) for key, held in value.items()}
        if isinstance(value, list | tuple | set):
            return [self.of(held, f"{where}[{i}]", depth + 1) for i, held in enumerate(value)]
        if isinstance(value, inert.Record):
            enum = value.state is None and len(value.given) == 1
            return self.of(value.given[0] if enum else value.fields, where, depth + 1)
        if isinstance(value, inert.Array | Tensor):
            return self.of(value.tolist(), where, depth + 1)
        raise ValueError(f"{where} is of type {type(value).__name__}, which JSON does not support")
