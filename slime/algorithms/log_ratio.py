"""The log of an importance ratio, clamped so that one broken token cannot make an infinite loss.

The clamp of +-20 (a ratio of 5e8) is far outside every trust region; a token that reaches it is counted, because it
means that trainer and engine disagree about the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def clamped_log_ratio(log_probs: Tensor, reference: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(log_probs - reference [T], clamped to +-`LOG_RATIO_LIMIT`, zero where masked; where it was clamped [T] bool).

    Differentiable in `log_probs` (a clamped token has zero gradient). Values at masked positions cannot matter, NaN
    included.
    """
    keep = mask > 0
    # Both operands are replaced before the subtraction: a NaN that only the result discards would come back as 0 * NaN
    # in the backward pass.
    raw = torch.where(keep, log_probs, torch.zeros_like(log_probs)) - torch.where(
        keep, reference, torch.zeros_like(reference)
    )
    return raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), raw.abs() > LOG_RATIO_LIMIT
