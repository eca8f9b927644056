"""What SGLang reads and computes, byte for byte: the payload of `/update_weights_from_tensor` and tensor digests.

A payload is a base64 pickle (`MultiprocessingSerializer`, SGLang 0.5.16): of `{"flattened_tensor", "metadata"}` for
`load_format="flattened_bucket"`, of a list of (name, tensor) for a loader of one's own. It holds handles, not data: the
name of a shared-memory file (CPU) or a CUDA IPC handle. SGLang reads it with a restricted unpickler, so only torch's
own rebuild functions and `SimpleNamespace` appear.

Nothing here imports SGLang on a CPU (its import takes 10 s); on CUDA only its hash kernel is imported, on first use.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
from collections.abc import Iterator, Sequence
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from slime.serving.shm import SHM
from slime.weights.byte_runs import byte_runs

_CUDA_DEVICE_ARGUMENT = 6
"""Position of the device in the arguments of torch's `rebuild_cuda_tensor`."""
_TILE_WORDS = 8192
"""32-bit words that one program of SGLang's hash kernel takes."""
_born: dict[str, reductions.StorageWeakRef] = {}
"""Files in /dev/shm of buffers made here."""
WARM_WORDS = (1, 16, 17, 16 * _TILE_WORDS, 2 * _TILE_WORDS + 1)
"""Lengths that need each form of the hash kernels."""


def serialize_bucket(
    named_tensors: Sequence[tuple[str, Tensor]],
    num_receivers: int,
    reuse: object = None,
    runs: Sequence[tuple[str, int]] | None = None,
) -> tuple[list[str], object]:
    """One payload per receiver, and the owner of the memory, which must live until every receiver has answered.

    `named_tensors`: (name, tensor), all on one device. Receivers count references, so none may share a payload.
    `reuse`: an owner that was returned before and that no receiver reads any more; on a CPU its memory is filled again
    if it is large enough (fresh shared memory takes ten times as long to fill as pages that exist).
    `runs`: (name, number of tensors) that a loader of one's own gets instead, each run of several in one dimension.
    """
    assert named_tensors, "empty bucket"
    buffer, metadata = _flatten(named_tensors, reuse if isinstance(reuse, Tensor) else None)
    flat = buffer[: metadata[-1].end_idx]

    def content() -> Any:
        if runs is None:
            return {"flattened_tensor": _shared(flat), "metadata": metadata}
        return [(name, _shared(tensor)) for name, tensor in _views(flat, metadata, runs)]

    return [_payload(content()) for _ in range(num_receivers)], buffer


def _views(
    flat: Tensor, metadata: Sequence[SimpleNamespace], runs: Sequence[tuple[str, int]]
) -> Iterator[tuple[str, Tensor]]:
    """The runs as views of the buffer."""
    left = iter(metadata)
    for name, num in runs:
        metas = list(islice(left, num))
        view = flat[metas[0].start_idx : metas[-1].end_idx].view(metas[0].dtype)
        yield name, view if num > 1 else view.view(metas[0].shape)


def _flatten(named_tensors: Sequence[tuple[str, Tensor]], reuse: Tensor | None) -> tuple[Tensor, list[SimpleNamespace]]:
    """All bytes at the start of one buffer [>= bytes] uint8 (on a CPU shared memory), and where each tensor lies."""
    metadata, start = [], 0
    for name, tensor in named_tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        where = {"start_idx": start, "end_idx": start + num_bytes, "numel": num_bytes}
        metadata.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **where))
        start += num_bytes
    device = named_tensors[0][1].device
    if device.type == "cpu" and reuse is not None and reuse.device == device and reuse.numel() >= start:
        flat = reuse
    elif device.type == "cpu":  # born in shared memory: sharing an ordinary tensor would copy it once more
        storage = torch.UntypedStorage._new_using_filename_cpu(start)
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        _remove_abandoned()
        _born[storage._share_filename_cpu_()[1].decode().lstrip("/")] = reductions.StorageWeakRef(storage)
    else:
        flat = torch.empty(start, dtype=torch.uint8, device=device)
    filled = 0
    for run in byte_runs(tensor for _, tensor in named_tensors):
        flat[filled : filled + len(run)].copy_(run)
        filled += len(run)
    if flat.is_cuda:  # the receiver reads on a stream of its own
        torch.cuda.current_stream(device).synchronize()
    return flat, metadata


def _remove_abandoned() -> None:
    """Files of buffers that are gone here: torch counts receivers in the file, and a killed one is never counted out.

    Never before torch has let go of a buffer: it ends a process whose file is missing then.
    """
    for name in [name for name, storage in _born.items() if storage.expired()]:
        del _born[name]
        with contextlib.suppress(FileNotFoundError):
            Path(SHM, name).unlink()


def _shared(tensor: Tensor) -> Any:
    return _CudaHandle(tensor) if tensor.is_cuda else tensor


def _payload(content: Any) -> str:
    buffer = io.BytesIO()
    strategy = torch.multiprocessing.get_sharing_strategy()
    # file_descriptor, the default on Linux, needs the two processes to share an authentication key
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        ForkingPickler(buffer).dump(content)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


class _CudaHandle:
    """Pickles as torch's IPC handle, with the device named by its UUID instead of its index: sender and receiver may
    number the GPUs of the host differently (pytorch pull request 149248; SGLang's receiver understands both)."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        index = arguments[_CUDA_DEVICE_ARGUMENT]
        if isinstance(index, int):
            uuid = str(torch.cuda.get_device_properties(index).uuid)
            arguments = (*arguments[:_CUDA_DEVICE_ARGUMENT], uuid, *arguments[_CUDA_DEVICE_ARGUMENT + 1 :])
        return rebuild, arguments


def digest(tensor: Tensor | Sequence[Tensor]) -> str:
    """The digest that `/weights_checker` reports for a tensor on this kind of device: 16 hex digits.

    A tensor may come as several, which the engine holds stacked along dim 0. CPU: the first 8 bytes of SHA-256 of the
    bytes in order. CUDA: SGLang's own kernel, `gpu_tensor_hash`.
    """
    flat = byte_runs([tensor] if isinstance(tensor, Tensor) else tensor)
    if flat[0].is_cuda:
        return _cuda_digest(flat)
    hasher = hashlib.sha256()
    for part in flat:
        hasher.update(part.numpy().data)
    return hasher.digest()[:8].hex()


def warm_digest(device: torch.device) -> None:
    """Imports SGLang's hash kernels and compiles them in the forms that a model's tensors need: takes seconds, once.

    Triton compiles a form for lengths that divide by 16 and one for others, of the hash and of the sum over its tiles;
    a single word is a form of its own.
    """
    for num_words in WARM_WORDS:
        digest(torch.zeros(4 * num_words, dtype=torch.uint8, device=device))


def _cuda_digest(parts: Sequence[Tensor]) -> str:
    # What `sglang.srt.managers.mm_utils.tensor_hash` calls for one tensor; that module imports all of SGLang.
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    flat = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    if flat.storage_offset() % 4:  # the kernel reads 32-bit words
        flat = flat.clone()
    return f"{gpu_tensor_hash(flat):016x}"
