"""Buckets: the tensors that travel together, end to end in memory that is filled again, two buffers of it.

Invariants
1. Tensors of a bucket lie end to end, wider types first: so each begins at a multiple of its element size, and
   whoever knows names, types and shapes knows where.
2. While one bucket is on its way the next is filled; a third waits. So a sender has two buckets beside its model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # transports are imported where torch is not
    import torch
    from torch import Tensor

NUM_BUFFERS = 2
"""One is filled while the other is sent."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor that travels."""

    name: str
    """Hugging Face's, under which an engine gets it."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors on their way."""

    tensors: tuple[tuple[str, Tensor], ...]
    """(HF name, full tensor): views of one memory, in which they lie end to end."""

    @classmethod
    def of(cls, specs: Iterable[Spec], memory: Tensor) -> Bucket:
        """Views for these tensors at the beginning of `memory` [bytes] uint8, whose content is whatever it is."""
        tensors, start = [], 0
        for spec in in_memory_order(specs):
            end = start + spec.num_bytes
            tensors.append((spec.name, memory[start:end].view(spec.dtype).view(spec.shape)))
            start = end
        return cls(tuple(tensors))

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(t.numel() * t.element_size() for _, t in self.tensors)

    @property
    def flat(self) -> Tensor:
        """[num_bytes] uint8: all of it as one view. Tensors that do not lie end to end are copied."""
        import torch

        from slime.weights.byte_runs import byte_runs

        runs = byte_runs(tensor for _, tensor in self.tensors)
        return runs[0] if len(runs) == 1 else torch.cat(runs)


def in_memory_order(specs: Iterable[Spec]) -> list[Spec]:
    """Wider types first, else in their order."""
    return sorted(specs, key=lambda spec: -spec.dtype.itemsize)


class Buffers:
    """The memory of a sender's buckets, which are filled in turn."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        """`allocate`: [bytes] uint8 of memory that the transport sends from."""
        self._allocate = allocate
        self._held: list[Tensor | None] = [None] * NUM_BUFFERS
        self._number = 0

    def next(self, specs: Sequence[Spec]) -> Bucket:
        """An unfilled bucket of these tensors, in the memory of the last but one, which nobody may read any more."""
        place, self._number = self._number % NUM_BUFFERS, self._number + 1
        num_bytes = sum(spec.num_bytes for spec in specs)
        held = self._held[place]
        if held is None or held.numel() < num_bytes:
            self._held[place] = held = None  # or both would be there for a moment
            self._held[place] = held = self._allocate(num_bytes)
        return Bucket.of(specs, held)

    def free(self) -> None:
        """Gives the memory back."""
        self._held = [None] * NUM_BUFFERS
