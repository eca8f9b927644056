"""What losses of tokens are made of: the clamped log of a ratio, sums over the samples of a micro-batch, the value loss
and the supervised loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# The log of an importance ratio, clamped so that one broken token cannot make an infinite loss.
#
# The clamp of +-20 (a ratio of 5e8) is far outside every trust region; a token that reaches it is counted, because it
# means that trainer and engine disagree about the model.

LOG_RATIO_LIMIT = 20.0


def unmasked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [R] with zeros (and zero gradient) where `mask` is 0, whatever stands there, NaN included.

    Applied to inputs, not to results: a NaN that only the result discards comes back as 0 * NaN in the backward pass.
    """
    import torch

    return torch.where(mask > 0, values, torch.zeros_like(values))


def clamped_log_ratio(
    log_probs: Tensor, reference: Tensor, mask: Tensor, limit: float = LOG_RATIO_LIMIT
) -> tuple[Tensor, Tensor]:
    """(log_probs - reference [R], clamped to +-`limit`, zero where masked; where it was clamped [R] bool).

    A limit of 0 means none. Differentiable in `log_probs` (a clamped token has zero gradient). Values at masked
    positions cannot matter, NaN included.
    """
    return clamp_counted(unmasked(log_probs, mask) - unmasked(reference, mask), limit)


def clamp_counted(raw: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """(raw clamped to +-`limit`, where it was clamped [bool]); a limit of 0 means none."""
    import torch

    if not limit:
        return raw, torch.zeros_like(raw, dtype=torch.bool)
    return raw.clamp(-limit, limit), raw.abs() > limit


# Which sample each response token of a micro-batch belongs to, and sums over samples.


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


# The clipped value loss of PPO (Schulman et al. 2017, arXiv:1707.06347, in the form of OpenAI baselines), without 1/2.
#
# The larger of the squared errors of the value and of the value held within `value_clip` of the old one.


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float
) -> tuple[Tensor, Tensor]:
    """(loss [R], differentiable in `values`; 1.0 where the clip decided it [R]); both zero where masked."""
    import torch

    value, old, target = unmasked(values, mask), unmasked(old_values.detach(), mask), unmasked(returns.detach(), mask)
    plain = (value - target).square()
    bounded = (old + (value - old).clamp(-value_clip, value_clip) - target).square()
    # Inside the clip the two differ by rounding alone.
    decided = (bounded > plain) & ((value - old).abs() > value_clip)
    return torch.maximum(plain, bounded), decided.to(values.dtype)


# Supervised loss: the negative log-prob of each trained token.


def negative_log_likelihood(log_probs: Tensor, mask: Tensor) -> Tensor:
    """-log_probs [T], zero (with zero gradient) where masked, whatever stands there."""
    import torch

    return torch.where(mask > 0, -log_probs, torch.zeros_like(log_probs))
