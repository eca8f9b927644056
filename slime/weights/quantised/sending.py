"""Quantises the trainer's weights on the fly for engines that store codes and scales instead of weights.

The sender has the full tensor and quantises it, so codes and scales do not depend on the trainer's layout. As with
all tensors, digests are computed before the codes and scales are copied into a bucket (`weights.sync`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from slime.core.errors import SlimeError, WeightSyncError
from slime.models.common.table import Entry
from slime.weights.quantised.formats import QuantisedFormat, engine_table
from slime.weights.send_plan import Outgoing, Spec, TensorGroup, Turn

RUN_BYTES = 64 * 2**20
"""Maximum total size of the consecutive tensors that are quantised together."""
TIMES = 6.5
"""Peak memory of quantisation relative to its input: input, float32 copy, scaled, rounded, and codes."""


def quantised_stream(
    named_tensors: Iterable[tuple[str, Tensor]], quantised: QuantisedFormat, run_bytes: int = RUN_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Replaces each weight in `quantised.names` with its codes and scales, preserving the order of the stream.

    Quantising one expert takes a dozen small kernels, so consecutive tensors of equal shape are quantised together in
    runs of up to `run_bytes`. Each tensor is copied before the next one is requested.
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


RUNS = 16
"""Minimum number of runs per bucket. Bounds the memory for quantising a run, which is `TIMES` its size."""


def quantised_outgoing(weights: Outgoing, quantised: QuantisedFormat | None) -> Outgoing:
    """Wraps `weights` (bfloat16) to send them in the engines' format. Raises `ConfigError` if it is unsupported."""
    return weights if quantised is None else QuantisedOutgoing(weights, quantised)


class QuantisedOutgoing:
    """An `Outgoing` of codes and scales. Each bucket holds the weights of one plain bucket, so it is about half
    full."""

    def __init__(self, weights: Outgoing, quantised: QuantisedFormat) -> None:
        self.table = engine_table(weights.table, quantised)
        self._weights, self._quantised = weights, quantised
        self._turns: tuple[int, tuple[Turn, ...]] = (0, ())
        self._plain: dict[int, Turn] = {}
        """Maps the `id` of each turn to the turn with the unquantised weights."""

    @property
    def device(self) -> torch.device:
        return self._weights.device

    def turns(self, limit_bytes: int) -> Sequence[Turn]:
        if self._turns[0] != limit_bytes:
            plain = self._weights.turns(limit_bytes)
            turns = tuple(Turn(turn.sender, tuple(map(self._quantised_group, turn.groups))) for turn in plain)
            self._plain = {id(turn): was for turn, was in zip(turns, plain, strict=True)}
            self._turns = limit_bytes, turns
        return self._turns[1]

    def _quantised_group(self, group: TensorGroup) -> TensorGroup:
        entries: dict[str, Entry] = {}
        specs: list[Spec] = []
        for spec in group.specs:
            if spec.name in self._quantised.names:
                parts = zip(self._quantised.parts_of(spec.name), self._quantised.dtypes, strict=True)
                specs += [Spec(name, self.table.shape_of(name), dtype) for name, dtype in parts]
            else:
                specs.append(spec)
        if not any(spec.name in self._quantised.names for spec in group.specs):
            return group
        for own in specs:
            entry = self.table.entry_of_hf(own.name)
            entries[entry.megatron] = entry
        return TensorGroup(tuple(entries.values()), tuple(specs), group.stage)

    @property
    def _run_bytes(self) -> int:
        """The maximum size of a run. Quantising it takes less than half a bucket of memory, and the two half-full
        buckets leave a whole bucket free."""
        return min(RUN_BYTES, self._turns[0] // RUNS)

    def fill_bytes(self, turn: Turn) -> int:
        """Includes both the memory for the plain weights and the memory for quantising them."""
        plain = self._plain[id(turn)]
        weights = (math.prod(spec.shape) * spec.dtype.itemsize for spec in plain.specs if self._quantises(spec))
        return self._weights.fill_bytes(plain) + int(
            TIMES * max((n for n in weights if 2 * n > self._run_bytes), default=0)
        )

    @property
    def places(self) -> Hashable:
        return None

    def _quantises(self, spec: Spec) -> bool:
        return spec.name in self._quantised.names

    def tensors(self, turn: Turn) -> Iterator[tuple[str, Tensor]]:
        """Yields codes, scales and plain tensors on the sender of a turn. Collective, like the wrapped method."""
        broken: list[Exception] = []

        def watched() -> Iterator[tuple[str, Tensor]]:
            try:
                yield from self._weights.tensors(self._plain[id(turn)])
            except Exception as error:
                broken.append(error)
                raise

        plain = watched()
        try:
            yield from quantised_stream(plain, self._quantised, self._run_bytes)
        except Exception as error:
            for _ in plain:  # finishes the stream, because other ranks wait in its collectives
                pass
            if broken or isinstance(error, SlimeError):
                raise
            raise WeightSyncError(f"quantising weights failed with {type(error).__name__}: {error}") from error
