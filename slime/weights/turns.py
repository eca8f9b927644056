"""The order of a weight sync: which training rank sends which tensors, bucket by bucket. Every rank works it out alike.

A pipeline stage sends its own layers. In a model with experts the ranks that share those of a stage take turns, some
layers each: the one whose turn it is gets the experts of the others (`training.state.outgoing`), so that every engine
tensor comes from one rank, in order, which can take its digest without holding it.

Invariants
1. Each tensor is in one turn, each turn has one sender, and all ranks know all turns.
2. What an engine holds in one tensor comes from one sender, in the order in which it is stacked there.
3. A bucket is at most as large as it may be, unless it holds one tensor, or tensors that an engine loads together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from slime.models.common.table import Entry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Buckets: the tensors that travel together, end to end in memory that is filled again, two buffers of it.
#
# Invariants
# 1. Tensors of a bucket lie end to end, wider types first: so each begins at a multiple of its element size, and
#    whoever knows names, types and shapes knows where.
# 2. While one bucket is on its way the next is filled; a third waits. So a sender has two buckets beside its model.

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

        from slime.weights.hf_shards import byte_runs

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


MAX_SENDERS = 4
"""Of a stage: each sender that is in a process group with engines costs every engine rank the memory of a
communicator."""


@dataclass(frozen=True, slots=True)
class Portion:
    """What buckets do not divide: the tensors of one parameter, or of experts that share them."""

    entries: tuple[Entry, ...]
    """Of the table; several where HF tensors hold all experts of a layer."""
    specs: tuple[Spec, ...]
    """What travels of them."""
    stage: int = 0
    """The pipeline stage that has it."""

    @property
    def num_bytes(self) -> int:
        """Of what travels."""
        return sum(spec.num_bytes for spec in self.specs)


@dataclass(frozen=True, slots=True)
class Turn:
    """One bucket, and who sends it."""

    sender: int
    """Training rank."""
    portions: tuple[Portion, ...]

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The tensors, in the order of the table."""
        return tuple(spec for portion in self.portions for spec in portion.specs)

    @property
    def hf_names(self) -> tuple[str, ...]:
        """The HF tensors of its portions."""
        return tuple(name for portion in self.portions for entry in portion.entries for name in entry.hf)

    @property
    def num_bytes(self) -> int:
        """Of the bucket."""
        return sum(portion.num_bytes for portion in self.portions)


def turns_of(
    portions: Iterable[Portion], *, senders: Sequence[Sequence[int]], limit_bytes: int, together: Mapping[str, str]
) -> tuple[Turn, ...]:
    """All turns, stage after stage.

    `portions`: in the order of the table. `senders`: of each stage the ranks that take turns. `together`: HF tensor ->
    a name that it shares with those that stay in its bucket.
    """
    assert limit_bytes > 0, f"bucket limit {limit_bytes}"
    turns: list[Turn] = []
    in_order = sorted(portions, key=lambda portion: portion.stage)
    for stage, own in groupby(in_order, lambda portion: portion.stage):
        ranks = senders[stage][:MAX_SENDERS]
        for number, share in enumerate(_shares(own, limit_bytes if len(ranks) > 1 else None)):
            turns += [Turn(ranks[number % len(ranks)], part) for part in _buckets(share, limit_bytes, together)]
    return tuple(turns)


def _shares(portions: Iterable[Portion], least_bytes: int | None) -> Iterator[list[Portion]]:
    """Whole layers of a stage, as many as make a bucket; all of it if nobody shares."""
    share: list[Portion] = []
    for _, layer in groupby(portions, lambda portion: portion.entries[0].layer):
        share += layer
        if least_bytes is not None and sum(portion.num_bytes for portion in share) >= least_bytes:
            yield share
            share = []
    if share:
        yield share


def _buckets(
    portions: Sequence[Portion], limit_bytes: int, together: Mapping[str, str]
) -> Iterator[tuple[Portion, ...]]:
    held: list[Portion] = []
    size = 0
    for portion in portions:
        key = together.get(portion.specs[0].name)
        joined = bool(held) and key is not None and key == together.get(held[-1].specs[-1].name)
        if held and size + portion.num_bytes > limit_bytes and not joined:
            yield tuple(held)
            held, size = [], 0
        held.append(portion)
        size += portion.num_bytes
    if held:
        yield tuple(held)
