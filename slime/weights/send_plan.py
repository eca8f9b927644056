"""The order of a weight sync: which training rank sends which tensors, bucket by bucket. All ranks compute the same
order.

A pipeline stage sends its own layers. In a model with experts, the ranks that share the experts of a stage take turns,
and each sends some layers. The sender of a turn gathers the experts of the other ranks (`training.state.outgoing`). So
each engine tensor comes from one rank, in order, and that rank can compute its digest without holding the whole tensor.

A bucket consists of tensors that are sent together from one block of memory, which is reused. The sender fills the next
bucket while one is in flight, so it needs memory for two buckets in addition to its model.

Invariants
1. Each tensor belongs to one turn, each turn has one sender, and all ranks know all turns.
2. One sender sends everything that an engine stacks in one tensor, in stacking order.
3. A bucket exceeds its size limit only for a single tensor or for tensors that an engine must load together.
4. The tensors of a bucket are adjacent in memory, wider types first. So each tensor begins at a multiple of its element
   size, and the names, types and shapes of all tensors determine where each one begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from slime.models.common.table import Entry, FamilyTable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NUM_BUFFERS = 2
"""One bucket is filled while the other is sent."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Name, shape and type of a tensor to send."""

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

    @classmethod
    def of(cls, specs: Iterable[Spec], memory: Tensor) -> Bucket:
        """Makes a bucket of views into `memory` ([bytes] uint8), from its start. Does not touch the content."""
        tensors, start = [], 0
        for spec in in_memory_order(specs):
            end = start + spec.num_bytes
            tensors.append((spec.name, memory[start:end].view(spec.dtype).view(spec.shape)))
            start = end
        return cls(tuple(tensors))

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, t in self.tensors)

    @property
    def flat(self) -> Tensor:
        """All tensors as one view, [num_bytes] uint8; a copy if they are not adjacent in memory."""
        import torch

        from slime.weights.hf_shards import byte_runs

        runs = byte_runs(tensor for _, tensor in self.tensors)
        return runs[0] if len(runs) == 1 else torch.cat(runs)


def in_memory_order(specs: Iterable[Spec]) -> list[Spec]:
    """Sorts by element size, largest first. Tensors of one size keep their order."""
    return sorted(specs, key=lambda spec: -spec.dtype.itemsize)


class Buffers:
    """The memory of a sender's two buckets, which are used alternately."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        """`allocate` returns memory that the transport can send from, [bytes] uint8."""
        self._allocate = allocate
        self._held: list[Tensor | None] = [None] * NUM_BUFFERS
        self._number = 0

    def next(self, specs: Sequence[Spec]) -> Bucket:
        """Returns an unfilled bucket in the memory of the second-to-last bucket. No engine may still be reading that
        bucket."""
        place, self._number = self._number % NUM_BUFFERS, self._number + 1
        num_bytes = sum(spec.num_bytes for spec in specs)
        held = self._held[place]
        if held is None or held.numel() < num_bytes:
            self._held[place] = held = None  # frees it before the larger one is allocated
            self._held[place] = held = self._allocate(num_bytes)
        return Bucket.of(specs, held)

    def free(self) -> None:
        self._held = [None] * NUM_BUFFERS


MAX_SENDERS = 4
"""Maximum number of senders per stage. Each sender's process group needs memory on every engine rank."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that must be in one bucket: those of one parameter, or of experts that share HF tensors."""

    entries: tuple[Entry, ...]
    """The entries of the table; several if HF tensors stack all experts of a layer."""
    specs: tuple[Spec, ...]
    stage: int = 0
    """The pipeline stage that holds the tensors."""

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)


@dataclass(frozen=True, slots=True)
class Turn:
    """One bucket and its sender."""

    sender: int
    """The training rank that sends."""
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
    """Returns all turns, stage after stage.

    `groups`: in the order of the table. `senders`: the ranks of each stage that take turns. `together`: HF tensor ->
    key. Tensors with the same key must be in one bucket.
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
    """Splits a stage at layer boundaries into shares of at least `least_bytes`; one share if that is None."""
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
        """Returns every bucket of every rank, in order. The result is the same on all ranks."""

    def fill_bytes(self, turn: Turn) -> int:
        """Returns how many bytes the sender needs to fill a turn's bucket, in addition to the bucket, the parameters
        and the space that every bucket leaves free."""

    def tensors(self, turn: Turn) -> Iterator[tuple[str, Tensor]]:
        """Yields (HF name, full tensor) for the bucket of a turn on its sender, and nothing on other ranks.

        All ranks must iterate over all turns, because ranks with shards of a turn's tensors send them to the sender. A
        tensor stays valid as long as it is referenced. If a tensor cannot be built, the iterator raises a `SlimeError`
        after the last tensor. After any other error the ranks are in different collectives, and the caller must not
        continue.
        """
