"""Sends consecutive experts to a single-rank engine as one run, which takes one copy instead of one load per tensor.

SGLang's loaders load experts one by one and search all parameter names for each of them. In 0.5.16 this takes 0.15 ms
per expert, or three seconds for 128 experts in 48 layers. A single-rank engine stores all experts of a layer
contiguously in one tensor. So the sender names each run after that tensor and the offset of its first element
(`named_runs`), and the engine copies the run to that offset (`load`).

slime passes `load` to SGLang as `--custom-weight-loader`. `load` forwards all other tensors to the model's own
loader.

Invariants
1. A run covers consecutive elements of one resident tensor, without overlap.
2. The first expert of every resident tensor goes through the model's loader. If the engine uses a different layout
   (transposed, up before gate, in blocks), the digest differs or the load fails. Digests could not detect this if all
   experts were copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line imports transports without torch
    from torch import Tensor

    from slime.models.common.table import FamilyTable

LOADER = f"{__name__}.load"
"""The import path of `load`, for `--custom-weight-loader`."""
_AT = "@"
"""Separates a resident tensor's name from the offset of a run. Tensor names never contain it."""

Places = Mapping[str, tuple[str, int]]
"""Maps an expert's HF tensor to the resident tensor that contains it and the offset in elements."""


def places_of(table: FamilyTable, *, on_cpu: bool) -> Places:
    """Returns where a single-rank engine stores each expert except the first. Omits padded and stacked experts."""
    from slime.models.common.table import DRAFT
    from slime.weights.engine_layout import holds_unchanged
    from slime.weights.holding import Share

    places: dict[str, tuple[str, int]] = {}
    for resident, held in table.resident.items():
        if (
            resident.startswith(DRAFT)
            or held[0].expert is None
            or not holds_unchanged(table, held, Share(), on_cpu=on_cpu)
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
    """Groups `tensors` into runs of experts and single other tensors. Returns (name, number of tensors) in order."""
    runs: list[tuple[str, int]] = []
    follows: tuple[str, int] | None = None  # where the next tensor must be stored to extend the run
    for name, tensor in tensors:
        place = places.get(name)
        if place is not None and place == follows:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((name if place is None else f"{place[0]}{_AT}{place[1]}", 1))
        follows = None if place is None else (place[0], place[1] + tensor.numel())
    return runs


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Copies runs to their offsets and passes other tensors to the loader of `model`. Called by SGLang."""
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
