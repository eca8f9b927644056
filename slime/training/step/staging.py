"""Copies host arrays to the device with one asynchronous copy per micro-batch, one micro-batch ahead.

A copy from pageable memory makes the host wait for the device, and a micro-batch has twenty arrays. `Staging` packs
them into pinned memory, copies it once on its own stream and returns views. While one micro-batch is computed, a
background thread packs and copies the next one.

Consumes functions that build micro-batches, and produces micro-batches in the same order, ready for the consumer's
stream. The consumer waits for the thread. The thread waits until the second-to-last copy has finished, because it
reuses that copy's buffer. A consumer that stops early closes the iterator, which stops the thread.

Invariants
1. Staging does not change a byte: copying each array separately would result in the same tensors.
2. The compute stream waits for a copy to finish before reading it, and device memory is not reused while that
   stream may still read it.
3. If building a micro-batch fails, the error is raised when the consumer requests that micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 128
"""In bytes. Kernels load full vectors, starting at the first byte of a tensor."""
NUM_BUFFERS = 2

T = TypeVar("T")
HostArrays = Mapping[str, npt.NDArray[Any]]
Put = Callable[[HostArrays], dict[str, Tensor]]
"""Copies host arrays to device tensors with the same names."""


def put_each(device: torch.device) -> Put:
    """Returns a `Put` that copies each array separately. On a CPU, the tensors share memory with the arrays."""

    def put(arrays: HostArrays) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
            for name, array in arrays.items()
        }

    return put


def layout(arrays: HostArrays) -> tuple[dict[str, int], int]:
    """Returns each array's byte offset in a shared buffer, and the size of the buffer."""
    starts, end = {}, 0
    for name, array in arrays.items():
        starts[name] = end
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return starts, end


@dataclass(slots=True)
class _Buffer:
    """Pinned memory, and the event that is recorded after the last copy out of it."""

    memory: Tensor | None = None
    copied: torch.cuda.Event | None = None

    def room(self, num_bytes: int, *, pinned: bool) -> Tensor:
        """Waits for the last copy out of the buffer, then returns its memory, [num_bytes] uint8."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.memory is None or self.memory.numel() < num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self.memory[:num_bytes]


class Staging:
    """One rank's pinned buffers. Only one iterator at a time can use them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers = [_Buffer() for _ in range(NUM_BUFFERS)]
        self._num_puts = 0

    def one_ahead(self, builds: Sequence[Callable[[Put], T]]) -> Generator[T]:
        """Calls each build function with a `put` and yields the results in order, building the next one meanwhile."""
        with ThreadPoolExecutor(1, thread_name_prefix="micro-batches") as pool:
            following: Future[tuple[T, torch.cuda.Event | None]] | None = None
            for build in builds:
                current, following = following, pool.submit(self._build, build)
                if current is not None:
                    yield self._taken(current)
            if following is not None:
                yield self._taken(following)

    def _build(self, build: Callable[[Put], T]) -> tuple[T, torch.cuda.Event | None]:
        with self._on_stream():
            value = build(self._put)
            return value, self._mark()

    def _taken(self, built: Future[tuple[T, torch.cuda.Event | None]]) -> T:
        """Waits for a built value and makes it safe to use on the calling thread's current stream."""
        value, made = built.result()
        if made is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(made)
            for tensor in _storages(value):
                tensor.record_stream(stream)
        return value

    def _put(self, arrays: HostArrays) -> dict[str, Tensor]:
        starts, num_bytes = layout(arrays)
        buffer = self._buffers[self._num_puts % NUM_BUFFERS]
        self._num_puts += 1
        room = buffer.room(num_bytes, pinned=self._stream is not None)
        bytes_ = room.numpy()
        for name, array in arrays.items():
            own = bytes_[starts[name] : starts[name] + array.nbytes].view(array.dtype)
            own.reshape(array.shape)[...] = array
        whole = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        whole.copy_(room, non_blocking=True)
        buffer.copied = self._mark()
        return {name: _view(whole, starts[name], array) for name, array in arrays.items()}

    def _mark(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _on_stream(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if self._stream is not None:
            stack.enter_context(torch.cuda.device(self._device))
            stack.enter_context(torch.cuda.stream(self._stream))
        return stack


def _storages(value: Any) -> list[Tensor]:
    """Returns the GPU tensors in nested dataclasses, lists and mappings, one per storage."""
    found: dict[int, Tensor] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            if one.is_cuda:
                found[one.untyped_storage().data_ptr()] = one
        elif dataclasses.is_dataclass(one):
            waiting += [getattr(one, field.name) for field in dataclasses.fields(one)]
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return list(found.values())


def _view(whole: Tensor, start: int, array: npt.NDArray[Any]) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return whole[start : start + array.nbytes].view(dtype).view(array.shape)
