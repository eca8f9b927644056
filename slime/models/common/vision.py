"""Image support of a family: a processor on the host, a vision tower on the device, and the images of a packed row."""

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
    """Turns images into patches, and computes the positions of their tokens. Deterministic; `N` images."""

    @property
    def token_id(self) -> int:
        """The id of the placeholder: one per image in a rendered prompt, in token ids one per image token."""

    def num_tokens(self, width: int, height: int) -> int:
        """The number of placeholders for an image. Raises `DataError` for a size that the model cannot read."""

    def patches(self, images: Sequence[bytes]) -> tuple[npt.NDArray[np.float32], Int64s]:
        """PNG files -> the patches of all images, concatenated [P, D], and grids [N, 3] of time, height and width."""

    def tokens_of(self, grids: Int64s) -> Int64s:
        """grids [N, 3] -> number of placeholders per image [N]."""

    def positions(self, starts: Int64s, grids: Int64s, num_tokens: int) -> Int64s:
        """The positions of a sample's tokens [3, num_tokens] in time, height and width. `starts` [N]: the first token
        of each image; `grids` [N, 3]: its size.
        """


class VisionTower(Protocol):
    """A frozen vision encoder."""

    def __call__(self, pixels: Tensor, grids: Tensor) -> tuple[Tensor, ...]:
        """pixels [P, D], grids [N, 3] on the host -> embeddings for the placeholders [V, H], then the features to add
        to them after the first layers, each [V, H]. No gradients.
        """

    def resident(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name in an engine of one rank, tensor in the engine's layout) of every parameter."""

    def leave(self) -> None:
        """Moves the tower to the host; the next call moves it back."""


@dataclass(slots=True)
class RowImages:
    """The images of a packed row of T tokens, with V placeholders."""

    pixels: Tensor
    """[P, D] patches of the row's distinct images, concatenated."""
    grids: Tensor
    """[N, 3] int64 on the host."""
    rows: Tensor
    """[V] int64: positions of the placeholders in the row."""
    features: Tensor
    """[V] int64: index of each placeholder's token in the tower's output; samples may share an image."""
    positions: Tensor
    """[3, T] int64: the position of each token in time, height and width."""
    deep: list[Tensor] = field(default_factory=list)
    """[V, H] each: the features that the first layers add; the model computes them in its pass over the row."""

    def into(self, embedded: Tensor, tower: VisionTower) -> Tensor:
        """embedded [T, 1, H] -> the same with the tower's output in place of the placeholders."""
        seen, *deep = (x.index_select(0, self.features) for x in tower(self.pixels, self.grids))
        self.deep = [x.unsqueeze(1).to(embedded.dtype) for x in deep]
        result: Any = embedded.index_copy(0, self.rows, seen.unsqueeze(1).to(embedded.dtype))
        return result
