"""The log of an importance ratio, clamped so that one broken token cannot make an infinite loss.

The clamp of +-20 (a ratio of 5e8) is far outside every trust region; a token that reaches it is counted, because it
means that trainer and engine disagree about the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

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
