"""Which part of a rank's optimizer belongs to one parameter of the whole model.

Megatron's distributed optimizer gives each rank a range of a flattened parameter. A stack of experts is one parameter
there, so that a range may hold the end of one expert, some whole ones and the beginning of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slime.training.model.names import Held
from slime.training.step.optimizer import Trainable


@dataclass(frozen=True, slots=True)
class Owned:
    """What this rank's optimizer has of one shard."""

    optimizer: Any
    """torch's."""
    main: Tensor
    """The main parameter that it is in."""
    within: slice
    """Of the flattened main parameter."""
    start: int
    """Where that range starts in the flattened shard."""

    def part(self, like: Tensor) -> Tensor:
        """Its part of a tensor that is laid out as the main parameter is: a flat view."""
        return like.view(-1)[self.within]


def owned_part(trainable: Trainable, held: Held) -> Owned | None:
    """What this rank's optimizer has of a shard; None for nothing: it is frozen, or in the range of another rank."""
    for inner in trainable.inner:
        if inner.optimizer is None:  # trains nothing here
            continue
        place = inner.model_param_group_index_map.get(held.parameter)
        if place is not None:
            group, index = place
            main = inner.optimizer.param_groups[group]["params"][index]
            start = int(inner._get_model_param_range_map(held.parameter)["param"].start)
            size = held.of(held.parameter).numel()
            first, end = max(start, held.start), min(start + main.numel(), held.start + size)
            if first >= end:  # other ranks have it: this one's range is of other experts
                return None
            return Owned(inner.optimizer, main, slice(first - start, end - start), first - held.start)
    return None
