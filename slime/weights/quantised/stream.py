"""The trainer's stream of (HF name, tensor) as the stream that a quantised engine takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from slime.weights.quantised.format import QuantisedFormat

if TYPE_CHECKING:
    from torch import Tensor

RUN_BYTES = 64 * 2**20
"""Of neighbours of one shape that are quantised together, at most."""
TIMES = 6.5
"""How often what is quantised is in memory meanwhile: as it is, in float32, scaled, rounded, and its codes."""


def quantised_stream(
    named_tensors: Iterable[tuple[str, Tensor]], quantised: QuantisedFormat, run_bytes: int = RUN_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Codes and scales in place of the weights that `quantised` names, everything else as it is, in order.

    Experts by themselves would cost a dozen small kernels each, so neighbours of one shape go together, in runs of
    `run_bytes`: each is copied before the next is asked for.
    """
    names: list[str] = []
    stack: Tensor | None = None

    def held() -> Iterator[tuple[str, Tensor]]:
        nonlocal stack
        if stack is not None:
            yield from quantised.one_by_one(names, stack[: len(names)])
        names.clear()
        stack = None

    for name, tensor in named_tensors:
        if stack is not None and (stack.shape[1:] != tensor.shape or len(names) == len(stack)):
            yield from held()
        if name not in quantised.names:
            yield from held()
            yield name, tensor
        elif 2 * tensor.nbytes > run_bytes:
            yield from held()
            yield from quantised.one_by_one([name], tensor.unsqueeze(0))
        else:
            if stack is None:
                stack = tensor.new_empty((run_bytes // tensor.nbytes, *tensor.shape))
            stack[len(names)] = tensor
            names.append(name)
    yield from held()
