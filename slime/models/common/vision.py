"""Images: the contracts of a family's processor (host) and vision tower (device), and the images of a packed row."""

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
    """Turns N images into patches and positions of their tokens. Deterministic."""

    @property
    def token_id(self) -> int:
        """The id of the placeholder. An image has one placeholder in a rendered prompt, but one per image token in
        token ids."""

    def num_tokens(self, width: int, height: int) -> int:
        """Returns the number of tokens of an image. Raises `DataError` for a shape that the model cannot read."""

    def patches(self, images: Sequence[bytes]) -> tuple[npt.NDArray[np.float32], Int64s]:
        """PNG files -> patches of all images [P, D], and grids [N, 3] of time, height and width."""

    def tokens_of(self, grids: Int64s) -> Int64s:
        """grids [N, 3] -> number of tokens of each image [N]."""

    def positions(self, starts: Int64s, grids: Int64s, num_tokens: int) -> Int64s:
        """Returns the positions [3, num_tokens] (time, height, width) of a sample's tokens. `starts` [N]: index of the
        first token of each image. `grids`: [N, 3]."""


class VisionTower(Protocol):
    """A frozen vision model."""

    def __call__(self, pixels: Tensor, grids: Tensor) -> tuple[Tensor, ...]:
        """pixels [P, D], grids [N, 3] on the host -> embeddings [V, H] that replace the placeholders, then tensors
        [V, H] that are added after the first layers. No gradients."""

    def resident(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields (resident name, tensor) of every parameter in a single-rank engine."""

    def leave(self) -> None:
        """Moves the tower to the host; the next call moves it back."""


@dataclass(slots=True)
class RowImages:
    """The images of a packed row of T tokens, with V placeholders."""

    pixels: Tensor
    """[P, D] patches of the row's distinct images."""
    grids: Tensor
    """[N, 3] int64 on the host."""
    rows: Tensor
    """[V] int64: indices of the placeholders in the row."""
    features: Tensor
    """[V] int64: the tower's token for each placeholder; samples may share an image."""
    positions: Tensor
    """[3, T] int64: time, height and width of each token."""
    deep: list[Tensor] = field(default_factory=list)
    """[V, H] per layer: the features that the first layers add; `into` sets them."""

    def into(self, embedded: Tensor, tower: VisionTower) -> Tensor:
        """embedded [T, 1, H] -> the same with the tower's embeddings instead of placeholders."""
        seen, *deep = (x.index_select(0, self.features) for x in tower(self.pixels, self.grids))
        self.deep = [x.unsqueeze(1).to(embedded.dtype) for x in deep]
        result: Any = embedded.index_copy(0, self.rows, seen.unsqueeze(1).to(embedded.dtype))
        return result
