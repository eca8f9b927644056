"""Image input: interfaces for a family's processor (host) and vision tower (device), and the images of a packed row."""

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
    """Turns N images into patches and token positions. Deterministic."""

    @property
    def token_id(self) -> int:
        """The placeholder's token id. A rendered prompt has one placeholder per image, and token ids have one per image
        token."""

    def num_tokens(self, width: int, height: int) -> int:
        """Returns an image's number of tokens. Raises `DataError` if the model does not support the image size."""

    def patches(self, images: Sequence[bytes]) -> tuple[npt.NDArray[np.float32], Int64s]:
        """PNG files -> patches of all images [P, D], and grid sizes [N, 3] (time, height, width)."""

    def tokens_of(self, grids: Int64s) -> Int64s:
        """grids [N, 3] -> number of tokens of each image [N]."""

    def positions(self, starts: Int64s, grids: Int64s, num_tokens: int) -> Int64s:
        """Returns the positions [3, num_tokens] (time, height, width) of a sample's tokens. `starts` [N]: index of each
        image's first token. `grids`: [N, 3]."""


class VisionTower(Protocol):
    """A frozen vision model."""

    def __call__(self, pixels: Tensor, grids: Tensor) -> tuple[Tensor, ...]:
        """pixels [P, D], grids [N, 3] on the host -> embeddings [V, H] for the placeholders, followed by tensors [V, H]
        that the first layers add to their output. No gradients."""

    def resident(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields (resident name, tensor) for every parameter, as in a single-rank engine."""

    def leave(self) -> None:
        """Moves the tower to the host. The next forward pass moves it back."""


@dataclass(slots=True)
class RowImages:
    """The images of a packed row with T tokens, V of which are placeholders."""

    pixels: Tensor
    """[P, D] patches of the distinct images in the row."""
    grids: Tensor
    """[N, 3] int64 on the host."""
    rows: Tensor
    """[V] int64: row indices of the placeholders."""
    features: Tensor
    """[V] int64: index of the tower output for each placeholder. Samples can share an image."""
    positions: Tensor
    """[3, T] int64: time, height and width of each token."""
    deep: list[Tensor] = field(default_factory=list)
    """[V, H] per layer: features that the first layers add to their output. Set by `into`."""

    def into(self, embedded: Tensor, tower: VisionTower) -> Tensor:
        """Replaces the placeholders in `embedded` [T, 1, H] with the tower's embeddings."""
        seen, *deep = (x.index_select(0, self.features) for x in tower(self.pixels, self.grids))
        self.deep = [x.unsqueeze(1).to(embedded.dtype) for x in deep]
        result: Any = embedded.index_copy(0, self.rows, seen.unsqueeze(1).to(embedded.dtype))
        return result
