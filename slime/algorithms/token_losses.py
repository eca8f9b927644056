"""Building blocks of token losses: the clamped log-ratio, sums over the samples of a micro-batch, the value loss and
the supervised loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# The log of an importance ratio, clamped so that one broken token cannot make the loss infinite.
#
# The limit of +-20 (a ratio of 5e8) is far outside any trust region. Tokens that reach it are counted, because they
# show that trainer and engine disagree about the model.

LOG_RATIO_LIMIT = 20.0


def unmasked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [R] with zeros (and zero gradient) where `mask` is 0, even if the value there is NaN.

    Apply it to inputs, not to results: a NaN that is discarded only in the result returns as 0 * NaN in the backward
    pass.
    """
    import torch

    return torch.where(mask > 0, values, torch.zeros_like(values))


def clamped_log_ratio(
    log_probs: Tensor, reference: Tensor, mask: Tensor, limit: float = LOG_RATIO_LIMIT
) -> tuple[Tensor, Tensor]:
    """(log_probs - reference [R], clamped to +-`limit`, zero where masked; [R] bool: where it was clamped).

    A limit of 0 means no clamp. Differentiable in `log_probs`; a clamped token has zero gradient. Values at masked
    positions cannot matter, NaN included.
    """
    return clamp_counted(unmasked(log_probs, mask) - unmasked(reference, mask), limit)


def clamp_counted(raw: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """(`raw` clamped to +-`limit`, bool: where it was clamped); a limit of 0 means no clamp."""
    import torch

    if not limit:
        return raw, torch.zeros_like(raw, dtype=torch.bool)
    return raw.clamp(-limit, limit), raw.abs() > limit


# The mapping from the response tokens of a micro-batch to samples, and sums over samples.


@dataclass(frozen=True, slots=True)
class Sequences:
    """The samples of a micro-batch. A sample is never split over micro-batches, so its sums are final."""

    ids: Tensor
    """[R] int64: sample of each response token, in [0, count)."""
    count: int
    """S, the number of samples, including those without response tokens (their sums are 0)."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each sample's tokens: [R] -> [S], accumulated in float64. Masked values must already be zero."""
        import torch

        total = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return total.index_add(0, self.ids, values.double()).to(values.dtype)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Mean over each sample's unmasked tokens: [R] -> [S]; 0 if it has none. Masked values cannot matter."""
        num = self.sum((mask > 0).to(values.dtype))
        return self.sum(unmasked(values, mask)) / num.clamp(min=1.0)

    def spread(self, values: Tensor) -> Tensor:
        """Copies each sample's value to all its tokens: [S] -> [R]."""
        return values.index_select(0, self.ids)


# The clipped value loss of PPO (Schulman et al. 2017, arXiv:1707.06347, in the form of OpenAI baselines), without 1/2.
#
# The larger of two squared errors: of the value, and of the value clamped to within `value_clip` of the old one.


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float
) -> tuple[Tensor, Tensor]:
    """(loss [R], differentiable in `values`; 1.0 where the clip determined it [R]); both zero where masked."""
    import torch

    value, old, target = unmasked(values, mask), unmasked(old_values.detach(), mask), unmasked(returns.detach(), mask)
    plain = (value - target).square()
    bounded = (old + (value - old).clamp(-value_clip, value_clip) - target).square()
    # Inside the clip range the two differ only by rounding.
    decided = (bounded > plain) & ((value - old).abs() > value_clip)
    return torch.maximum(plain, bounded), decided.to(values.dtype)


# Supervised loss: the negative log-prob of each trained token.


def negative_log_likelihood(log_probs: Tensor, mask: Tensor) -> Tensor:
    """[T] -log_probs, zero (with zero gradient) where masked."""
    import torch

    return torch.where(mask > 0, -log_probs, torch.zeros_like(log_probs))
