"""Functions for token losses: the clamped log-ratio, sums over a micro-batch's samples, value and supervised loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Default limit of log-ratios, so that one bad token cannot make the loss infinite. A ratio of 5e8 is far outside every
trust region. Clamped tokens are counted, because they mean that trainer and engine disagree about the model."""


def unmasked(values: Tensor, mask: Tensor) -> Tensor:
    """Returns `values` [R], with zeros and zero gradient where `mask` is 0, even for NaN.

    Apply it to inputs, not to results: a NaN that is discarded only in the result comes back as 0 * NaN in the backward
    pass.
    """
    import torch

    return torch.where(mask > 0, values, torch.zeros_like(values))


def clamped_log_ratio(
    log_probs: Tensor, reference: Tensor, mask: Tensor, limit: float = LOG_RATIO_LIMIT
) -> tuple[Tensor, Tensor]:
    """Returns (log_probs - reference [R], clamped to +-`limit`, zero where masked; [R] bool: where it was clamped).

    A limit of 0 means no limit. Differentiable in `log_probs`; a clamped token has zero gradient. Masked values cannot
    matter, even NaN.
    """
    return clamp_counted(unmasked(log_probs, mask) - unmasked(reference, mask), limit)


def clamp_counted(raw: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Returns (raw clamped to +-`limit`, where it was clamped [bool]). A limit of 0 means no limit."""
    import torch

    if not limit:
        return raw, torch.zeros_like(raw, dtype=torch.bool)
    return raw.clamp(-limit, limit), raw.abs() > limit


@dataclass(frozen=True, slots=True)
class Sequences:
    """The samples of a micro-batch. A sample is never split over micro-batches, so its sums are final."""

    ids: Tensor
    """[R] int64: sample of each response token, in [0, count)."""
    count: int
    """S, the number of samples. A sample without response tokens has the sum 0."""

    def sum(self, values: Tensor) -> Tensor:
        """Sums over each sample's tokens, [R] -> [S], accumulated in float64. Masked values must be zero."""
        import torch

        total = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return total.index_add(0, self.ids, values.double()).to(values.dtype)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Averages over each sample's unmasked tokens, [R] -> [S]; 0 without any. Masked values cannot matter."""
        num = self.sum((mask > 0).to(values.dtype))
        return self.sum(unmasked(values, mask)) / num.clamp(min=1.0)

    def spread(self, values: Tensor) -> Tensor:
        """Repeats each sample's value at each of its tokens, [S] -> [R]."""
        return values.index_select(0, self.ids)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float
) -> tuple[Tensor, Tensor]:
    """Computes PPO's clipped value loss (Schulman et al. 2017, arXiv:1707.06347, as in OpenAI baselines), without 1/2:
    the larger squared error of the value and of the value clipped to within `value_clip` of the old one.

    Returns (loss [R], differentiable in `values`; 1.0 where the clip took effect [R]), both zero where masked.
    """
    import torch

    value, old, target = unmasked(values, mask), unmasked(old_values.detach(), mask), unmasked(returns.detach(), mask)
    plain = (value - target).square()
    bounded = (old + (value - old).clamp(-value_clip, value_clip) - target).square()
    # Within the clip range the two losses differ only by rounding.
    decided = (bounded > plain) & ((value - old).abs() > value_clip)
    return torch.maximum(plain, bounded), decided.to(values.dtype)


def negative_log_likelihood(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Returns the supervised loss: -log_probs [T], zero (with zero gradient) where masked."""
    return unmasked(-log_probs, mask)
