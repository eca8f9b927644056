"""From host arrays to tensors on the device: all of a micro-batch in one copy that nothing waits for, one batch ahead.

A copy from ordinary memory makes the host wait for the device, and a micro-batch has twenty arrays. `Staging` lays them
end to end in pinned memory, copies that once on a stream of its own and gives out views. While one micro-batch is
computed, a thread packs and copies the next one.

Consumes: what builds the micro-batches, in order. Produces: these, in the same order, ready for the stream that asks.
Waits for: the thread, which waits for the copy before the last one to have left its buffer. Is woken by: the thread.
Whoever stops early closes the iterator, which ends the thread.

Invariants
1. Bytes are those of the arrays; without staging each array makes the same tensor by itself.
2. Memory of the device is given to the computing stream before it is used, and is not reused before that has read it.
3. What a build raises is raised where its micro-batch was asked for, after those before it.
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
"""Bytes. Kernels read whole vectors from the beginning of a tensor."""
NUM_BUFFERS = 2

T = TypeVar("T")
HostArrays = Mapping[str, npt.NDArray[Any]]
Put = Callable[[HostArrays], dict[str, Tensor]]
"""Makes tensors on the device of host arrays, under the same names."""


def put_each(device: torch.device) -> Put:
    """Each by itself; on a CPU the tensors share the memory of the arrays."""

    def put(arrays: HostArrays) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
            for name, array in arrays.items()
        }

    return put


def layout(arrays: HostArrays) -> tuple[dict[str, int], int]:
    """Where each array begins in one buffer, in bytes, and how long that is. No two overlap."""
    starts, end = {}, 0
    for name, array in arrays.items():
        starts[name] = end
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return starts, end


@dataclass(slots=True)
class _Buffer:
    """Pinned memory, and when the copy out of it has ended."""

    memory: Tensor | None = None
    copied: torch.cuda.Event | None = None

    def room(self, num_bytes: int, *, pinned: bool) -> Tensor:
        """[num_bytes] uint8 that nothing reads any more."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.memory is None or self.memory.numel() < num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self.memory[:num_bytes]


class Staging:
    """The pinned buffers of one rank; one iterator at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers = [_Buffer() for _ in range(NUM_BUFFERS)]
        self._num_puts = 0

    def one_ahead(self, builds: Sequence[Callable[[Put], T]]) -> Generator[T]:
        """What each build makes with the `put` that it is given, in order; the next one is under way meanwhile."""
        with ThreadPoolExecutor(1, thread_name_prefix="micro-batches") as pool:
            following: Future[tuple[T, torch.cuda.Event | None]] | None = None
            for build in builds:
                current, following = following, pool.submit(self._build, build)
                if current is not None:
                    yield self._taken(current)
            if following is not None:
                yield self._taken(following)

    def _build(self, build: Callable[[Put], T]) -> tuple[T, torch.cuda.Event | None]:
        """On the thread. What was made, and when the device has it."""
        with self._on_stream():
            value = build(self._put)
            return value, self._mark()

    def _taken(self, built: Future[tuple[T, torch.cuda.Event | None]]) -> T:
        """On the thread that computes: its stream may use from here on whatever was made on the other one."""
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
        """Of what is under way now."""
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
    """Of all tensors on a GPU in nested records, lists and mappings: one for each storage."""
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
