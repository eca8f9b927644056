"""Building blocks of token losses: clamped log-ratio, per-sample sums in a micro-batch, value loss, supervised loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Default clamp for log-ratios, so that a single bad token cannot make the loss infinite. A ratio of 5e8 is far outside
any trust region. Clamped tokens are counted, because they indicate that trainer and engine disagree about the model."""


def unmasked(values: Tensor, mask: Tensor) -> Tensor:
    """Returns `values` [R] with zeros, and zero gradient, where `mask` is 0, even for NaN.

    Apply it to inputs, not results: a NaN masked only in the result reappears as 0 * NaN in the backward pass.
    """
    import torch

    return torch.where(mask > 0, values, torch.zeros_like(values))


def clamped_log_ratio(
    log_probs: Tensor, reference: Tensor, mask: Tensor, limit: float = LOG_RATIO_LIMIT
) -> tuple[Tensor, Tensor]:
    """Returns (log_probs - reference [R], clamped to +-`limit`, zero where masked; bool [R], where it was clamped).

    A limit of 0 disables the clamp. Differentiable in `log_probs`, with zero gradient for clamped tokens. Masked
    entries have no effect, even if they are NaN.
    """
    return clamp_counted(unmasked(log_probs, mask) - unmasked(reference, mask), limit)


def clamp_counted(raw: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Returns (raw clamped to +-`limit`, bool where it was clamped). A limit of 0 disables the clamp."""
    import torch

    if not limit:
        return raw, torch.zeros_like(raw, dtype=torch.bool)
    return raw.clamp(-limit, limit), raw.abs() > limit


@dataclass(frozen=True, slots=True)
class Sequences:
    """Maps the tokens of a micro-batch to samples. A sample is never split across micro-batches, so sums are final."""

    ids: Tensor
    """[R] int64 sample index of each response token, in [0, count)."""
    count: int
    """S, the number of samples. The sum over a sample without response tokens is 0."""

    def sum(self, values: Tensor) -> Tensor:
        """Sums over the tokens of each sample, [R] -> [S], accumulating in float64. Masked values must be zero."""
        import torch

        total = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return total.index_add(0, self.ids, values.double()).to(values.dtype)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Averages over the trained tokens of each sample, [R] -> [S]; 0 if there are none. Ignores masked values."""
        num = self.sum((mask > 0).to(values.dtype))
        return self.sum(unmasked(values, mask)) / num.clamp(min=1.0)

    def spread(self, values: Tensor) -> Tensor:
        """Broadcasts the value of each sample to its tokens, [S] -> [R]."""
        return values.index_select(0, self.ids)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float
) -> tuple[Tensor, Tensor]:
    """Computes PPO's clipped value loss (Schulman et al. 2017, arXiv:1707.06347, as in OpenAI baselines), without the
    factor 1/2: the larger squared error of the value and of the value clipped to within `value_clip` of the old one.

    Returns (loss [R], 1.0 where it was clipped [R]), both zero where masked. Differentiable in `values`.
    """
    import torch

    value, old, target = unmasked(values, mask), unmasked(old_values.detach(), mask), unmasked(returns.detach(), mask)
    plain = (value - target).square()
    bounded = (old + (value - old).clamp(-value_clip, value_clip) - target).square()
    # Within the clip range, the two losses differ only by rounding.
    decided = (bounded > plain) & ((value - old).abs() > value_clip)
    return torch.maximum(plain, bounded), decided.to(values.dtype)


def negative_log_likelihood(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Returns the supervised loss -log_probs [T], with zeros and zero gradient where masked."""
    return unmasked(-log_probs, mask)
