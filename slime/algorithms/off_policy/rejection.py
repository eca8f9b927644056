"""Rejection of tokens or sequences whose mismatch ratio leaves a band (Liu et al. 2025, "When speed kills stability").

Unlike the mode "mask" of the importance weights it decides only who takes part, so weights of one level and rejection
of another can be combined. Rejected tokens stay in the denominators of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from slime.algorithms.log_ratio import LOG_RATIO_LIMIT
from slime.algorithms.off_policy import CORRECTIONS, MismatchCorrection, OffPolicyTokens
from slime.algorithms.off_policy.levels import Level, mismatch_log_ratio
from slime.core.errors import ConfigError
from slime.settings.fields import opt

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.sequences import Sequences
    from slime.settings import Args


@CORRECTIONS.register("rejection")
@dataclass(frozen=True, kw_only=True)
class Rejection(MismatchCorrection):
    """Leaves out what is out of the band (`--rejection-level`)."""

    switch: ClassVar[str] = "--rejection-level"

    rejection_level: Level | None = None
    """Leave tokens (or whole sequences) out of the loss whose w is out of bounds, apart from the weight."""
    rejection_low: float = opt(0.5, ge=0)
    """Lower bound of an accepted w."""
    rejection_high: float = opt(2.0, ge=0)
    """Upper bound of an accepted w."""
    rejection_veto: float | None = opt(None, ge=0)
    """A sequence with one token whose w is below this is left out."""

    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Correction`."""
        keep = rejection_mask(
            tokens.trainer_log_probs,
            tokens.rollout_log_probs,
            tokens.sampled,
            tokens.sequences,
            level=self.rejection_level or "token",
            low=self.rejection_low,
            high=self.rejection_high,
            veto=self.rejection_veto,
            log_ratio_limit=tokens.log_ratio_limit,
        )
        return loss * keep, {"rejected": 1.0 - keep}

    def check(self, args: Args) -> None:
        """See `Correction`."""
        super().check(args)
        if self.rejection_low > self.rejection_high:
            raise ConfigError(
                f"got rejection_low {self.rejection_low} and rejection_high {self.rejection_high}, because no ratio "
                "lies between them; give 0 <= low <= high"
            )


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
