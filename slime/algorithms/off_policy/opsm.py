"""Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556).

A sequence with a negative advantage that the policy has moved away from, mean(log old - log policy) > delta, is left
out: pushing its tokens down further would be learning from what the policy no longer says.
"""

from __future__ import annotations

from torch import Tensor

from slime.algorithms.log_ratio import LOG_RATIO_LIMIT, clamped_log_ratio, unmasked
from slime.algorithms.sequences import Sequences


def opsm_mask(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    *,
    delta: float,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> Tensor:
    """0.0 where the token's advantage is negative and its sequence's mean of old - new exceeds `delta`, else 1.0; [R].

    Pass the engine's log-probs as `old_log_probs` to measure the distance from the sampler instead.
    """
    log_ratio, _ = clamped_log_ratio(log_probs.detach(), old_log_probs.detach(), mask, log_ratio_limit)
    far = sequences.spread(sequences.mean(-log_ratio, mask)) > delta
    return (~(far & (unmasked(advantages, mask) < 0))).to(log_ratio.dtype)
