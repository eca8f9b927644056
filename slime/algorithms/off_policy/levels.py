"""The mismatch ratio p_trainer_old / p_engine of a token, or of the sequence that it belongs to.

token: its own ratio. sequence: the product over the sequence's unmasked tokens (the exact importance weight; its
variance grows with the length). geometric: the geometric mean of the same tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from slime.algorithms.log_ratio import clamp_counted, clamped_log_ratio, unmasked

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.sequences import Sequences
    from slime.settings.groups.algorithm import Level


def mismatch_log_ratio(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, sequences: Sequences, level: Level, limit: float
) -> tuple[Tensor, Tensor]:
    """(log ratio [R] at `level`, detached, zero where masked; where a clamp acted [R] bool).

    The clamp of +-`limit` holds for each token and for the sum of a sequence.
    """
    log_ratio, limited = clamped_log_ratio(old_log_probs.detach(), rollout_log_probs.detach(), mask, limit)
    if level == "token":
        return log_ratio, limited
    if level == "geometric":
        return unmasked(sequences.spread(sequences.mean(log_ratio, mask)), mask), limited
    if level == "sequence":
        total, too_far = clamp_counted(sequences.sum(log_ratio), limit)
        return unmasked(sequences.spread(total), mask), limited | (sequences.spread(too_far) & (mask > 0))
    assert_never(level)
