"""The trainer's stream of (HF name, tensor) as the stream that a quantised engine takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from slime.weights.quantised.format import QuantisedFormat

if TYPE_CHECKING:
    from torch import Tensor

RUN_BYTES = 64 * 2**20
"""Of neighbours of one shape that are quantised together; besides them about four times as much is in memory, once."""


def quantised_stream(
    named_tensors: Iterable[tuple[str, Tensor]], quantised: QuantisedFormat | None
) -> Iterator[tuple[str, Tensor]]:
    """Codes and scales in place of the weights that `quantised` names, everything else as it is, in order.

    Experts by themselves would cost a dozen small kernels each, so neighbours of one shape go together.
    """
    if quantised is None:
        yield from named_tensors
        return
    names: list[str] = []
    weights: list[Tensor] = []

    def flushed() -> Iterator[tuple[str, Tensor]]:
        if names:
            yield from quantised.one_by_one(names, weights)
            names.clear()
            weights.clear()

    for name, tensor in named_tensors:
        if name not in quantised.names:
            yield from flushed()
            yield name, tensor
            continue
        if weights and (weights[0].shape != tensor.shape or len(weights) * tensor.nbytes >= RUN_BYTES):
            yield from flushed()
        names.append(name)
        weights.append(tensor)
    yield from flushed()
