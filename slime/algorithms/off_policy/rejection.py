"""Rejection of tokens or sequences whose mismatch ratio leaves a band (Liu et al. 2025, "When speed kills stability").

Unlike the mode "mask" of the importance weights it decides only who takes part, so weights of one level and rejection
of another can be combined. Rejected tokens stay in the denominators of the loss.
"""

from __future__ import annotations

from torch import Tensor

from slime.algorithms.log_ratio import LOG_RATIO_LIMIT
from slime.algorithms.off_policy.levels import mismatch_log_ratio
from slime.algorithms.sequences import Sequences


def rejection_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    sequences: Sequences,
    *,
    level: str = "token",
    low: float | None = None,
    high: float | None = None,
    veto: float | None = None,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> Tensor:
    """1.0 where low <= ratio <= high at `level` (None: no bound), else 0.0; [R], 1 where masked.

    One unmasked token with a ratio below `veto` rejects its whole sequence.
    """
    ratio = mismatch_log_ratio(old_log_probs, rollout_log_probs, mask, sequences, level, log_ratio_limit)[0].exp()
    trained = mask > 0
    rejected = trained & False
    if low is not None:
        rejected = rejected | (ratio < low)
    if high is not None:
        rejected = rejected | (ratio > high)
    if veto is not None:
        token = mismatch_log_ratio(old_log_probs, rollout_log_probs, mask, sequences, "token", log_ratio_limit)[0].exp()
        hits = sequences.sum(((token < veto) & trained).to(token.dtype))
        rejected = rejected | (sequences.spread(hits) > 0)
    return (~(rejected & trained)).to(ratio.dtype)
