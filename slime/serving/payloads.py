"""Creates SGLang's `/update_weights_from_tensor` payloads and computes its tensor digests, byte-identical to SGLang's.

A payload is a base64-encoded pickle (`MultiprocessingSerializer`, SGLang 0.5.16). It contains `{"flattened_tensor",
"metadata"}` for `load_format="flattened_bucket"`, or a list of (name, tensor) for a custom loader. Tensors are pickled
as handles: the name of a shared-memory file (CPU) or a CUDA IPC handle. SGLang's unpickler allows only a few globals,
so payloads use only torch's rebuild functions and `SimpleNamespace`.

This module does not import SGLang, because that takes 10 s.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from slime.core.engine_interface import Hasher
from slime.serving.child_process import SHM
from slime.serving.tensor_hash import TileHasher, finish_all, read_all, recording
from slime.weights.hf_shards import byte_runs

_CUDA_DEVICE_ARGUMENT = 6
"""Index of the device argument of torch's `rebuild_cuda_tensor`."""
_born: dict[str, reductions.StorageWeakRef] = {}
"""This process's buffers, by their file names in /dev/shm."""


def serialize_bucket(
    named_tensors: Sequence[tuple[str, Tensor]],
    num_receivers: int,
    *,
    runs: Sequence[tuple[str, int]] | None = None,
    only: Container[str] | None = None,
) -> tuple[list[str], object]:
    """Returns one payload per receiver, and an owner that keeps the memory alive. Hold it until all receivers respond.

    `named_tensors`: all on one device. Tensors that are contiguous in `shareable` memory are shared without a copy;
    others are first copied there. Receivers keep reference counts, so each one needs its own payload. `runs`: (name,
    number of tensors) for a custom loader, which gets each run of several tensors as one flat tensor. `only`: names of
    the tensors to include in the metadata.
    """
    assert named_tensors, "empty bucket"
    flat, metadata = _flatten(named_tensors)
    if only is not None:
        metadata = [meta for meta in metadata if meta.name in only]

    def content() -> Any:
        if runs is None:
            return {"flattened_tensor": _shared(flat), "metadata": metadata}
        return [(name, _shared(tensor)) for name, tensor in _views(flat, metadata, runs)]

    return [_payload(content()) for _ in range(num_receivers)], flat


def shareable(num_bytes: int, device: torch.device) -> Tensor:
    """Allocates memory [num_bytes] uint8 that other processes on the host can map. On a CPU, this is shared memory."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)  # sharing an ordinary storage would copy it
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    _remove_abandoned()
    _born[storage._share_filename_cpu_()[1].decode().lstrip("/")] = reductions.StorageWeakRef(storage)
    return flat


def _views(
    flat: Tensor, metadata: Sequence[SimpleNamespace], runs: Sequence[tuple[str, int]]
) -> Iterator[tuple[str, Tensor]]:
    left = iter(metadata)
    for name, num in runs:
        metas = list(islice(left, num))
        view = flat[metas[0].start_idx : metas[-1].end_idx].view(metas[0].dtype)
        yield name, view if num > 1 else view.view(metas[0].shape)


def _flatten(named_tensors: Sequence[tuple[str, Tensor]]) -> tuple[Tensor, list[SimpleNamespace]]:
    """Returns all tensors contiguously in `shareable` memory ([bytes] uint8), and metadata with their offsets."""
    metadata, start = [], 0
    for name, tensor in named_tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        where = {"start_idx": start, "end_idx": start + num_bytes, "numel": num_bytes}
        metadata.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **where))
        start += num_bytes
    runs = byte_runs(tensor for _, tensor in named_tensors)
    if len(runs) == 1 and runs[0].untyped_storage().is_shared():
        flat = runs[0]
    else:
        flat, filled = shareable(start, runs[0].device), 0
        for run in runs:
            flat[filled : filled + len(run)].copy_(run)
            filled += len(run)
    if flat.is_cuda:  # the receiver reads on a different stream
        torch.cuda.current_stream(flat.device).synchronize()
    return flat, metadata


def _remove_abandoned() -> None:
    """Deletes the files of freed buffers. torch leaks such a file if a receiver is killed while holding a reference.

    torch must have freed the buffer first, because it aborts the process if the file is missing. Several threads can
    call this at the same time; the one that pops a name from the table deletes the file.
    """
    for name, storage in list(_born.items()):
        if storage.expired() and _born.pop(name, None) is not None:
            with contextlib.suppress(FileNotFoundError):
                Path(SHM, name).unlink()


def _shared(tensor: Tensor) -> Any:
    return _CudaHandle(tensor) if tensor.is_cuda else tensor


def _payload(content: Any) -> str:
    buffer = io.BytesIO()
    strategy = torch.multiprocessing.get_sharing_strategy()
    # file_descriptor, the default on Linux, requires both processes to share an authentication key
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        ForkingPickler(buffer).dump(content)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


class _CudaHandle:
    """Pickles a tensor as torch's IPC handle with the device's UUID instead of its index, because sender and receiver
    may number the GPUs differently (pytorch pull request 149248). SGLang's receiver accepts both.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        index = arguments[_CUDA_DEVICE_ARGUMENT]
        if isinstance(index, int):
            uuid = str(torch.cuda.get_device_properties(index).uuid)
            arguments = (*arguments[:_CUDA_DEVICE_ARGUMENT], uuid, *arguments[_CUDA_DEVICE_ARGUMENT + 1 :])
        return rebuild, arguments


class _Digest:
    """The digest that `/weights_checker` reports for a tensor: 16 hex digits. See `core.engine_interface.Digest`.

    On a CPU, it is the first 8 bytes of the SHA-256 of the tensor's bytes. On a GPU, it is `tensor_hash`.
    """

    def __call__(self, parts: Tensor | Sequence[Tensor]) -> str:
        hasher = self.begin()
        hasher.add([parts] if isinstance(parts, Tensor) else parts)
        return hasher.finish()

    def begin(self) -> _PartsHasher:
        return _PartsHasher()

    def read(self, hashers: Sequence[Hasher]) -> None:
        read_all([hasher.tiles for hasher in hashers if isinstance(hasher, _PartsHasher) and hasher.tiles is not None])

    def finish(self, hashers: Sequence[Hasher]) -> list[str]:
        tiles = [hasher.tiles for hasher in hashers if isinstance(hasher, _PartsHasher) and hasher.tiles is not None]
        of_tiles = iter(finish_all(tiles))
        return [
            next(of_tiles) if isinstance(hasher, _PartsHasher) and hasher.tiles is not None else hasher.finish()
            for hasher in hashers
        ]

    def recording(self, device: torch.device) -> AbstractContextManager[object]:
        return recording(device)


class _PartsHasher:
    """Hashes with SHA-256 or `TileHasher`, depending on the device of the first part."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self.tiles: TileHasher | None = None

    def add(self, parts: Sequence[Tensor]) -> None:
        if parts and parts[0].is_cuda:
            self.tiles = self.tiles or TileHasher()
            self.tiles.add(parts)
            return
        for run in byte_runs(parts):
            self._sha.update(run.numpy().data)

    def finish(self) -> str:
        return self._sha.digest()[:8].hex() if self.tiles is None else self.tiles.finish()


digest = _Digest()


def warm_digest(device: torch.device) -> None:
    """Precompiles the GPU digest kernel, which can take seconds."""
    digest(torch.zeros(4, dtype=torch.uint8, device=device))
