"""Which sample each response token of a micro-batch belongs to, and sums over samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algorithms.log_ratio import unmasked

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """The samples of a micro-batch. A sample is whole in its micro-batch, so its sums are final."""

    ids: Tensor
    """[R] int64: sample of each response token, in [0, count)."""
    count: int
    """S, the number of samples; one without response tokens has the sum 0."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each sample's tokens: [R] -> [S]; accumulated in float64. Masked values must be zero already."""
        import torch

        total = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return total.index_add(0, self.ids, values.double()).to(values.dtype)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Mean over each sample's unmasked tokens: [R] -> [S]; 0 if it has none. Masked values cannot matter."""
        num = self.sum((mask > 0).to(values.dtype))
        return self.sum(unmasked(values, mask)) / num.clamp(min=1.0)

    def spread(self, values: Tensor) -> Tensor:
        """Each sample's value at each of its tokens: [S] -> [R]."""
        return values.index_select(0, self.ids)
