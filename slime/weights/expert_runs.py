"""Experts on their way to an engine of one rank: runs of neighbours, each one copy, in place of thousands of tensors.

SGLang's loaders take the experts of a model one by one and look through all their names for each: 0.15 ms, which for a
model of 128 experts in 48 layers is three seconds (0.5.16). An engine of one rank holds the experts of a layer in one
tensor, end to end in the order in which they come. So the sender gives a run of them the name of that tensor and where
the run begins in it (`named_runs`), and the engine copies it there (`load`).

`load` runs in SGLang's scheduler: `--custom-weight-loader` names it, a switch of SGLang's own. What is not a run goes
to the model's loader.

Invariants
1. A run covers elements of one resident tensor alone, in order, each once.
2. The first expert of every resident tensor goes through the loader of the model. An engine that holds experts in
   another order than it is given (transposed, up before gate, in blocks) then reports another digest of it, or fails:
   bytes that were put where the trainer has them prove nothing about what an engine takes them for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # transports are imported where torch is not
    from torch import Tensor

    from slime.models.common.table import FamilyTable

LOADER = f"{__name__}.load"
"""As SGLang imports it."""
_AT = "@"
"""Between the name of a resident tensor and the element at which a run begins; no tensor is called so."""

Places = Mapping[str, tuple[str, int]]
"""HF tensor of an expert -> the engine's tensor that holds it, and at which element."""


def places_of(table: FamilyTable, *, on_cpu: bool) -> Places:
    """Where an engine of one rank holds each expert but the first; none of those that it would pad, or that the files
    hold stacked.
    """
    from slime.models.common.table import DRAFT
    from slime.weights.engine_layout import held_as_given
    from slime.weights.holding import Share

    places: dict[str, tuple[str, int]] = {}
    for resident, held in table.resident.items():
        if (
            resident.startswith(DRAFT)
            or held[0].expert is None
            or not held_as_given(table, held, Share(), on_cpu=on_cpu)
        ):
            continue
        start = 0
        for e in held:
            for name, shape in zip(e.hf, e.row.shapes, strict=True):
                if e.expert:
                    places[name] = resident, start
                start += math.prod(shape)
    return places


def named_runs(tensors: Sequence[tuple[str, Tensor]], places: Places) -> list[tuple[str, int]]:
    """(name, number of tensors) of what `tensors` are to travel as, in order: runs of experts, others one by one."""
    runs: list[tuple[str, int]] = []
    follows: tuple[str, int] | None = None  # where the next expert of the run would have its place
    for name, tensor in tensors:
        place = places.get(name)
        if place is not None and place == follows:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((name if place is None else f"{place[0]}{_AT}{place[1]}", 1))
        follows = None if place is None else (place[0], place[1] + tensor.numel())
    return runs


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """SGLang's custom weight loader: copies runs where they belong, gives the rest to the loader of `model`."""
    others = []
    for name, tensor in named_tensors:
        resident, mark, start = name.rpartition(_AT)
        if not mark:
            others.append((name, tensor))
            continue
        whole = model.get_parameter(resident).data.view(-1)
        whole[int(start) : int(start) + tensor.numel()].copy_(tensor.view(-1))
    if others:
        model.load_weights(others)
