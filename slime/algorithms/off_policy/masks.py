"""Corrections that mask tokens or sequences: rejection by mismatch ratio, and DeepSeek-V3.2's sequence masking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from slime.algorithms.off_policy import CORRECTIONS, Correction, MismatchCorrection, OffPolicyTokens
from slime.algorithms.off_policy.tis import mismatch_log_ratio
from slime.algorithms.token_losses import LOG_RATIO_LIMIT, clamped_log_ratio, unmasked
from slime.settings.fields import opt
from slime.settings.flags import BOUND
from slime.settings.groups.algorithm import Level

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.token_losses import Sequences
    from slime.settings import Args


@CORRECTIONS.register("rejection")
@dataclass(frozen=True, kw_only=True)
class Rejection(MismatchCorrection):
    """Masks tokens or sequences with a mismatch ratio outside a range (Liu et al. 2025, "When speed kills stability").

    Unlike importance weights in mode "mask", rejection only masks, so it can be combined with weights at a different
    level. Rejected tokens still count in the denominators of the loss.
    """

    switch: ClassVar[str] = "--rejection-level"
    asked_by: ClassVar[str] = "rejection_level"
    place: ClassVar[int] = 30

    rejection_low: float = opt(0.5, within=BOUND)
    """Minimum accepted w."""
    rejection_high: float = opt(2.0, within=BOUND)
    """Maximum accepted w."""
    rejection_veto: float | None = opt(None, within=BOUND)
    """Reject a whole sequence if any of its tokens has a w below this."""

    @classmethod
    def asked_for(cls, settings: Any) -> bool:
        return settings.rejection_level is not None

    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        level = tokens.args.rejection_level
        assert level is not None, "required by `check`"
        keep = rejection_mask(
            tokens.trainer_log_probs,
            tokens.rollout_log_probs,
            tokens.sampled,
            tokens.sequences,
            level=level,
            low=self.rejection_low,
            high=self.rejection_high,
            veto=self.rejection_veto,
            log_ratio_limit=tokens.log_ratio_limit,
        )
        return loss * keep, {"rejected": 1.0 - keep}

    def check(self, args: Args) -> str | None:
        if args.rejection_level is None:
            return "--off-policy-corrections rejection needs --rejection-level; set it to token, sequence or geometric"
        if self.rejection_low > self.rejection_high:
            return (
                f"--rejection-low {self.rejection_low} and --rejection-high {self.rejection_high} must satisfy "
                "0 <= low <= high"
            )
        return super().check(args)


def rejection_mask(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    sequences: Sequences,
    *,
    level: Level = "token",
    low: float | None = None,
    high: float | None = None,
    veto: float | None = None,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> Tensor:
    """Returns a mask [R]: 1.0 where low <= ratio <= high at `level` (None: no bound) or where masked, else 0.0.

    A trained token with a ratio below `veto` rejects its whole sequence.
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


@CORRECTIONS.register("opsm")
@dataclass(frozen=True, kw_only=True)
class OffPolicySequenceMasking(Correction):
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556).

    Masks a sequence with a negative advantage if mean(log old - log policy) > delta, that is, if the policy has already
    moved away from the response and rarely samples it.
    """

    switch: ClassVar[str] = "--use-opsm"
    asked_by: ClassVar[str] = "use_opsm"
    place: ClassVar[int] = 40
    needs_rollout_log_probs: ClassVar[bool] = False

    opsm_delta: float = opt(1e-4, within=BOUND)
    """Mask sequences with a negative advantage if their mean of old minus current log-prob exceeds this."""

    @classmethod
    def asked_for(cls, settings: Any) -> bool:
        return bool(settings.use_opsm)

    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        keep = opsm_mask(
            tokens.log_probs,
            tokens.old_log_probs,
            tokens.advantages,
            tokens.mask,
            tokens.sequences,
            delta=self.opsm_delta,
            log_ratio_limit=tokens.log_ratio_limit,
        )
        return loss * keep, {"opsm_clipfrac": 1.0 - keep}


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
    """Returns a mask [R]: 0.0 where the advantage is negative and the sequence mean of old - new exceeds `delta`."""
    log_ratio, _ = clamped_log_ratio(log_probs.detach(), old_log_probs.detach(), mask, log_ratio_limit)
    far = sequences.spread(sequences.mean(-log_ratio, mask)) > delta
    return (~(far & (unmasked(advantages, mask) < 0))).to(log_ratio.dtype)
