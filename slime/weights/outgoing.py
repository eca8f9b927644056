"""What the weight sync is given: weights of a trainer, as one rank takes part in sending them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from slime.models.common.table import FamilyTable
from slime.weights.turns import Portion, Spec, Turn, turns_of


class Outgoing(Protocol):
    """The weights of one version on one training rank."""

    @property
    def table(self) -> FamilyTable:
        """Of the model."""
        ...

    @property
    def device(self) -> torch.device:
        """Of the tensors."""
        ...

    def turns(self, limit_bytes: int) -> Sequence[Turn]:
        """Every bucket of every rank, in order; the same on all ranks."""
        ...

    def beside(self, turn: Turn) -> int:
        """Bytes that its sender has while it fills the bucket of a turn, beside that bucket and the parameters, as far
        as they are more than what every bucket leaves room for."""
        ...

    def tensors(self, turn: Turn) -> Iterator[tuple[str, Tensor]]:
        """On its sender the (HF name, full tensor) of a turn, each as it is until nobody holds it any more.

        All ranks walk through all turns: those that have a part of its tensors give it, and get nothing. What is wrong
        with a tensor is raised as a `SlimeError` after all parts of the turn were given. Any other error leaves the
        ranks in different collectives, and whoever sees it must not go on.
        """
        ...


class Whole:
    """`Outgoing` of a trainer whose ranks hold all tensors whole."""

    def __init__(
        self,
        table: FamilyTable,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        rank: int = 0,
        senders: Sequence[Sequence[int]] = ((0,),),
    ) -> None:
        """`named_tensors`: (HF name, full tensor) in any order; those that are missing are found out when they are
        sent. `rank`: this one. `senders`: the ranks that take turns.
        """
        self.table, self._rank, self._senders = table, rank, senders
        self._tensors: Mapping[str, Tensor] = dict(named_tensors)
        self.device = next(iter(self._tensors.values())).device

    def turns(self, limit_bytes: int) -> Sequence[Turn]:
        """Raises `WeightSyncError` for a tensor that the table does not name."""
        portions = [
            Portion((self.table.entry_of_hf(name),), (Spec(name, tuple(tensor.shape), tensor.dtype),))
            for name, tensor in self._tensors.items()
        ]
        return turns_of(portions, senders=self._senders, limit_bytes=limit_bytes, together=self.table.together)

    def beside(self, turn: Turn) -> int:
        """Nothing is gathered."""
        return 0

    def tensors(self, turn: Turn) -> Iterator[tuple[str, Tensor]]:
        """Nothing on other ranks."""
        for spec in turn.specs if turn.sender == self._rank else ():
            yield spec.name, self._tensors[spec.name]
