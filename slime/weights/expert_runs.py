"""Sends neighbouring experts to a single-rank engine as runs: one copy per run instead of thousands of tensors.

SGLang's loaders load experts one by one and search all names for each expert. This takes 0.15 ms per expert, or three
seconds for 128 experts in 48 layers (0.5.16). A single-rank engine holds the experts of a layer one after the other in
one tensor. So the sender names a run after that tensor and the element where the run begins (`named_runs`), and the
engine copies the run there (`load`).

SGLang's scheduler calls `load`, because slime passes it as `--custom-weight-loader`. Other tensors go to the model's
loader.

Invariants
1. A run consists of consecutive elements of one resident tensor, each once.
2. The first expert of every resident tensor goes through the model's loader. If the engine stores experts in a
   different order (transposed, up before gate, in blocks), its digest then differs or the load fails. If all experts
   were copied, digests could not detect this.
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
"""Separates the name of a resident tensor from the element where a run begins. No tensor name contains it."""

Places = Mapping[str, tuple[str, int]]
"""HF tensor of an expert -> (the engine tensor that holds the expert, the element where the expert begins)."""


def places_of(table: FamilyTable, *, on_cpu: bool) -> Places:
    """Returns where a single-rank engine holds each expert except the first. Omits padded and stacked experts."""
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
    """Returns (name, number of tensors) for each run of experts in `tensors` and for each other tensor, in order."""
    runs: list[tuple[str, int]] = []
    follows: tuple[str, int] | None = None  # the place that would continue the run
    for name, tensor in tensors:
        place = places.get(name)
        if place is not None and place == follows:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((name if place is None else f"{place[0]}{_AT}{place[1]}", 1))
        follows = None if place is None else (place[0], place[1] + tensor.numel())
    return runs


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Copies runs to their places and passes other tensors to the loader of `model`. SGLang calls it."""
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
