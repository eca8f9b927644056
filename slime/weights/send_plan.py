"""The schedule of a weight sync: which training rank sends which tensors, in which order. All ranks compute the same
one.

Each pipeline stage sends its own layers. In an MoE model, the ranks that share the experts of a stage take turns, and
each sends some of the layers. The sender of a turn gathers the other ranks' experts (`training.state.outgoing`). Each
engine tensor thus comes from one rank, in order, and that rank can compute its digest without storing all of it.

A bucket is a set of tensors that are sent together from one reusable block of memory. The sender fills the next bucket
while one is in flight, so it needs memory for two buckets in addition to its model.

Invariants
1. Each tensor belongs to exactly one turn, each turn has one sender, and all ranks know all turns.
2. All tensors that an engine stacks into one come from the same sender, in stacking order.
3. A bucket exceeds the size limit only if it holds a single large tensor or tensors that must be loaded together.
4. The tensors of a bucket are adjacent in memory, wider dtypes first. So each tensor is aligned to its element size,
   and all offsets follow from the names, dtypes and shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from slime.models.common.table import Entry, FamilyTable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NUM_BUFFERS = 2
"""Double buffering: one bucket is filled while the other is sent."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Name, shape and dtype of a tensor to send."""

    name: str
    """The tensor's HF name."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Bucket:
    tensors: tuple[tuple[str, Tensor], ...]
    """(HF name, full tensor) of each tensor. The tensors are adjacent views into one block of memory."""
    memory: Tensor | None = None
    """That block, [num_bytes] uint8, if it is known."""

    @classmethod
    def of(cls, specs: Iterable[Spec], memory: Tensor) -> Bucket:
        """Creates a bucket of views into `memory` ([bytes] uint8), starting at offset 0. Does not write to the
        memory."""
        tensors, start = [], 0
        for spec in in_memory_order(specs):
            end = start + spec.num_bytes
            tensors.append((spec.name, memory[start:end].view(spec.dtype).view(spec.shape)))
            start = end
        return cls(tuple(tensors), memory[:start])

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, t in self.tensors)

    @property
    def flat(self) -> Tensor:
        """All tensors as one flat view [num_bytes] uint8, or as a copy if they are not adjacent in memory."""
        import torch

        from slime.weights.hf_shards import byte_runs

        if self.memory is not None:
            return self.memory
        runs = byte_runs(tensor for _, tensor in self.tensors)
        return runs[0] if len(runs) == 1 else torch.cat(runs)


def in_memory_order(specs: Iterable[Spec]) -> list[Spec]:
    """Sorts by element size, largest first. The sort is stable."""
    return sorted(specs, key=lambda spec: -spec.dtype.itemsize)


class Buffers:
    """A sender's two buffers, which its buckets use alternately."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        """`allocate` returns memory that the transport can send from, [bytes] uint8."""
        self._allocate = allocate
        self._held: list[Tensor | None] = [None] * NUM_BUFFERS
        self._number = 0
        self._num_freed = 0

    def next(self, specs: Sequence[Spec]) -> Bucket:
        """Returns an unfilled bucket that reuses the second-to-last bucket's memory, which no engine may still be
        reading."""
        place, self._number = self._number % NUM_BUFFERS, self._number + 1
        num_bytes = sum(spec.num_bytes for spec in specs)
        held = self._held[place]
        if held is None or held.numel() < num_bytes:
            self._held[place] = held = None  # frees the old buffer before allocating a larger one
            self._held[place] = held = self._allocate(num_bytes)
        return Bucket.of(specs, held)

    def alone(self, specs: Sequence[Spec]) -> Bucket:
        """Returns an unfilled bucket in memory of its own, which is freed with the bucket."""
        return Bucket.of(specs, self._allocate(sum(spec.num_bytes for spec in specs)))

    def begin(self) -> None:
        """Starts a weight sync, so that its buckets use the same memory as those of the sync before."""
        self._number = 0

    @property
    def places(self) -> Hashable:
        """A value that changes when the memory of a buffer is replaced."""
        return self._num_freed, tuple(None if one is None else one.data_ptr() for one in self._held)

    def free(self) -> None:
        self._num_freed += 1
        self._held = [None] * NUM_BUFFERS


MAX_SENDERS = 4
"""Maximum number of senders per stage. Each sender's process group takes memory on every engine rank."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that must go into one bucket: those of one parameter, or of several experts that share HF tensors."""

    entries: tuple[Entry, ...]
    """The entries in the weight table; more than one if HF tensors stack all experts of a layer."""
    specs: tuple[Spec, ...]
    stage: int = 0
    """The pipeline stage that holds the tensors."""

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)


@dataclass(frozen=True, slots=True)
class Turn:
    """One slot of the schedule: a bucket and the rank that sends it."""

    sender: int
    """The training rank that sends the bucket."""
    groups: tuple[TensorGroup, ...]

    @property
    def specs(self) -> tuple[Spec, ...]:
        """All tensors of the bucket, in the order of the table."""
        return tuple(spec for group in self.groups for spec in group.specs)

    @property
    def hf_names(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for entry in group.entries for name in entry.hf)

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self.groups)


def turns_of(
    groups: Iterable[TensorGroup], *, senders: Sequence[Sequence[int]], limit_bytes: int, together: Mapping[str, str]
) -> tuple[Turn, ...]:
    """Returns all turns, stage by stage.

    `groups`: in table order. `senders`: for each stage, the ranks that take turns. `together`: maps HF tensors to keys;
    tensors with the same key must go into one bucket.
    """
    assert limit_bytes > 0, f"bucket limit {limit_bytes}"
    turns: list[Turn] = []
    in_order = sorted(groups, key=lambda group: group.stage)
    for stage, own in groupby(in_order, lambda group: group.stage):
        ranks = senders[stage][:MAX_SENDERS]
        for number, share in enumerate(_shares(own, limit_bytes if len(ranks) > 1 else None)):
            turns += [Turn(ranks[number % len(ranks)], part) for part in _buckets(share, limit_bytes, together)]
    return tuple(turns)


def _shares(groups: Iterable[TensorGroup], least_bytes: int | None) -> Iterator[list[TensorGroup]]:
    """Splits a stage at layer boundaries into shares of at least `least_bytes`. None: a single share."""
    share: list[TensorGroup] = []
    for _, layer in groupby(groups, lambda group: group.entries[0].layer):
        share += layer
        if least_bytes is not None and sum(group.num_bytes for group in share) >= least_bytes:
            yield share
            share = []
    if share:
        yield share


def _buckets(
    groups: Sequence[TensorGroup], limit_bytes: int, together: Mapping[str, str]
) -> Iterator[tuple[TensorGroup, ...]]:
    held: list[TensorGroup] = []
    size = 0
    for group in groups:
        key = together.get(group.specs[0].name)
        joined = bool(held) and key is not None and key == together.get(held[-1].specs[-1].name)
        if held and size + group.num_bytes > limit_bytes and not joined:
            yield tuple(held)
            held, size = [], 0
        held.append(group)
        size += group.num_bytes
    if held:
        yield tuple(held)


class Outgoing(Protocol):
    """The weights of one version on one training rank."""

    @property
    def table(self) -> FamilyTable: ...

    @property
    def device(self) -> torch.device: ...

    def turns(self, limit_bytes: int) -> Sequence[Turn]:
        """Returns all turns of all ranks in order. The result is the same on every rank."""

    def fill_bytes(self, turn: Turn) -> int:
        """Returns how much extra memory the sender needs to fill a turn's bucket, beyond the bucket, the parameters and
        the memory that is always left free for each bucket."""

    @property
    def places(self) -> Hashable:
        """A value that changes when the memory of a parameter moves. None if a CUDA graph cannot repeat the work of
        `tensors`, for example because the host reads some of it."""

    def tensors(self, turn: Turn) -> Iterator[tuple[str, Tensor]]:
        """Yields (HF name, full tensor) for a turn's bucket on its sender, and nothing on other ranks.

        All ranks must iterate over all turns, because ranks with shards of a turn's tensors send them to the sender. A
        tensor stays valid as long as it is referenced. If a tensor cannot be built, the iterator raises a `SlimeError`
        after the last tensor. After any other error the ranks are out of step in their collectives, so the caller must
        not continue.
        """
