"""What a quantised checkpoint says of its weights, and the arithmetic to plain ones and back: a class for each format.

Invariants
1. Codes and scales of a weight depend on that weight alone: whoever has the whole tensor makes the same bits, whatever
   the layout of trainer or engine.
2. A block of `block` entries shares a scale, so a part of a weight that begins and ends at whole blocks is quantised
   as it would be within the whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.core.errors import CheckpointError, ConfigError
from slime.models.common.table import Row, Unit

if TYPE_CHECKING:  # torch is imported where it is used
    import torch
    from torch import Tensor

WHOLE = 0
"""In place of a number of rows or columns: all of them."""


def require_finite(scales: Tensor, weights: Tensor, kind: str) -> None:
    """Raises `CheckpointError` if a scale of `weights` [..., out, in] is not finite, because an entry is not."""
    if not scales.isfinite().all():
        raise CheckpointError(
            f"got a weight {list(weights.shape[-2:])} with an infinite or undefined entry; {kind} has neither: look at "
            "the step that made it"
        )


@dataclass(frozen=True)
class QuantisedFormat(ABC):
    """The quantisation of one checkpoint."""

    names: frozenset[str]
    """HF names, `<module>.weight`, of the weights that the files hold quantised. Everything else is as it is."""

    @property
    @abstractmethod
    def title(self) -> str:
        """In messages."""

    @property
    @abstractmethod
    def block(self) -> tuple[int, int]:
        """Rows and columns of the entries that share a scale; `WHOLE`: all that the weight has."""

    @abstractmethod
    def parts_of(self, hf_name: str) -> tuple[str, ...]:
        """Names in the files of what stands for the weight `hf_name`."""

    @property
    @abstractmethod
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the parts, in the order of `parts_of`."""

    def about(self, hf_name: str) -> str | None:
        """A further tensor of the files that says something of the weight that its parts say as well."""
        return None

    @abstractmethod
    def quantise(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Weights [..., out, in] -> their parts, each [..., *shape of the part], on the same device.

        Raises `CheckpointError` for a weight that is not finite.
        """

    @abstractmethod
    def dequantise(self, parts: Sequence[Tensor]) -> Tensor:
        """The weight [..., out, in] of these parts, in float32: what the engine multiplies with, but for its rounding.

        Raises `CheckpointError` if their shapes do not belong together.
        """

    @abstractmethod
    def rows(self, row: Row) -> tuple[Row, ...]:
        """What an engine holds for a row whose weights are quantised: a row for each part.

        Raises `ConfigError` where engines cannot hold it so.
        """

    def require_linear(self, row: Row) -> None:
        """Raises `ConfigError` for a row that engines do not hold quantised."""
        if row.stacked or Unit.VOCAB in row.units:
            raise ConfigError(
                f"got {row.hf[0]} in {self.title}: engines hold vocabularies, and experts that files stack, as they "
                "are; quantise linear layers alone"
            )

    def fake(self, weights: Tensor) -> Tensor:
        """Weights as engines have them, which get and multiply bfloat16: quantised, dequantised, in their own dtype."""
        import torch

        return self.dequantise(self.quantise(weights.to(torch.bfloat16))).to(torch.bfloat16).to(weights.dtype)

    def is_quantised(self, hf_names: Sequence[str]) -> bool:
        """Whether these weights, which an engine fuses, are quantised: all or none of them are."""
        found = [name in self.names for name in hf_names]
        return bool(found) and all(found)

    def one_by_one(self, names: Sequence[str], weights: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name of a part, part) of several weights [n, out, in], quantised together."""
        parts = self.quantise(weights)
        for i, name in enumerate(names):
            for part_name, part in zip(self.parts_of(name), parts, strict=True):
                yield part_name, part[i]
