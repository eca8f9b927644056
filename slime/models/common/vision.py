"""What a family that reads images brings: a processor on the host, a vision tower on the device; and a packed row's
images, as model and layers need them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Int64s = npt.NDArray[np.int64]


class ImageProcessor(Protocol):
    """From pictures to patches, and to the places of their tokens. Deterministic; `N` images."""

    @property
    def token_id(self) -> int:
        """The placeholder: one in a rendered prompt, in token ids one for each token that the image is read as."""

    def num_tokens(self, width: int, height: int) -> int:
        """Placeholders of an image of so many pixels. Raises `DataError` for a shape that the model cannot read."""

    def patches(self, images: Sequence[bytes]) -> tuple[npt.NDArray[np.float32], Int64s]:
        """PNG files -> the patches of all of them, end to end [P, D], and grids [N, 3] of time, height and width."""

    def tokens_of(self, grids: Int64s) -> Int64s:
        """grids [N, 3] -> placeholders of each image [N]."""

    def positions(self, starts: Int64s, grids: Int64s, num_tokens: int) -> Int64s:
        """Where images with these `grids` [N, 3] begin among the tokens of a sample, `starts` [N] -> positions of its
        tokens [3, num_tokens] in time, height and width."""


class VisionTower(Protocol):
    """A frozen model that sees."""

    def __call__(self, pixels: Tensor, grids: Tensor) -> tuple[Tensor, ...]:
        """pixels [P, D], grids [N, 3] on the host -> what stands in place of the placeholders [V, H], then what is
        added to them behind the first layers, each [V, H]. No gradients."""

    def resident(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name in an engine of one rank, tensor as it holds it) of every parameter."""

    def leave(self) -> None:
        """Goes to the host; the next call brings it back."""


@dataclass(slots=True)
class RowImages:
    """The images of a packed row of T tokens, with V placeholders."""

    pixels: Tensor
    """[P, D] patches of the row's different images, end to end."""
    grids: Tensor
    """[N, 3] int64 on the host."""
    rows: Tensor
    """[V] int64: where in the row placeholders stand."""
    features: Tensor
    """[V] int64: which of the tower's tokens each stands for; samples may have an image in common."""
    positions: Tensor
    """[3, T] int64: where each token of the row stands in time, height and width."""
    deep: list[Tensor] = field(default_factory=list)
    """[V, H] each: what the layers add, from the first one on; the model makes them in its pass over the row."""

    def into(self, embedded: Tensor, tower: VisionTower) -> Tensor:
        """embedded [T, 1, H] -> the same with what the tower sees in place of the placeholders."""
        seen, *deep = (x.index_select(0, self.features) for x in tower(self.pixels, self.grids))
        self.deep = [x.unsqueeze(1).to(embedded.dtype) for x in deep]
        result: Any = embedded.index_copy(0, self.rows, seen.unsqueeze(1).to(embedded.dtype))
        return result
