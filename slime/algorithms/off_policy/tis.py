"""Importance weights between engine and trainer: truncated (TIS; Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training") or masked (icepop, MIS; Ling team 2025, arXiv:2510.18855).

Tokens are sampled by an inference engine whose probabilities differ from the trainer's by rounding, precision or age.
The policy gradient is multiplied by w = p_trainer_old / p_engine, held in [low, high] ("truncate") or replaced by 0
outside of it ("mask"), without a gradient of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, assert_never

from slime.algorithms.log_ratio import LOG_RATIO_LIMIT
from slime.algorithms.off_policy import CORRECTIONS, MismatchCorrection, OffPolicyTokens
from slime.algorithms.off_policy.levels import mismatch_log_ratio
from slime.settings.fields import opt
from slime.settings.flags import BOUND
from slime.settings.groups.algorithm import Level

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.sequences import Sequences
    from slime.settings import Args

Mode = Literal["truncate", "mask"]


@dataclass(frozen=True, kw_only=True)
class Weighing(MismatchCorrection):
    """How the weights are made; of those that act and of those that are only reported."""

    tis_clip: float = opt(2.0, within=BOUND)
    """Upper bound of the weight."""
    tis_clip_low: float = opt(0.0, within=BOUND)
    """Lower bound of the weight."""
    tis_level: Level = "token"
    """The weight of a token is its own, the product over its sequence, or the geometric mean of it."""
    tis_mode: Mode = "truncate"
    """A weight out of bounds becomes the bound (TIS), or zero (icepop, MIS)."""

    def check(self, args: Args) -> str | None:
        """See `Correction`."""
        if self.tis_clip_low > self.tis_clip:
            return (
                f"got tis_clip_low {self.tis_clip_low} and tis_clip {self.tis_clip}, because no weight lies between "
                "them; give 0 <= low <= high"
            )
        return super().check(args)

    def weights(self, tokens: OffPolicyTokens) -> ImportanceWeights:
        """Of the tokens that an engine sampled; 1 elsewhere."""
        return importance_weights(
            tokens.trainer_log_probs,
            tokens.rollout_log_probs,
            tokens.sampled,
            tokens.sequences,
            level=self.tis_level,
            mode=self.tis_mode,
            low=self.tis_clip_low,
            high=self.tis_clip,
            log_ratio_limit=tokens.log_ratio_limit,
        )


@CORRECTIONS.register("tis")
@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(Weighing):
    """Multiplies the policy loss by the weights."""

    switch: ClassVar[str] = "--use-tis without --custom-tis-function-path"
    asked_by: ClassVar[str] = "use_tis"
    place: ClassVar[int] = 10

    @classmethod
    def asked_for(cls, settings: Any) -> bool:
        """Unless `custom_tis` takes its place."""
        return bool(settings.use_tis and not settings.custom_tis_function_path)

    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Correction`."""
        weights = self.weights(tokens)
        return loss * weights.weight, weights.metrics()

    def check(self, args: Args) -> str | None:
        """A function of the user's is called by `custom_tis` alone."""
        if args.custom_tis_function_path and "custom_tis" not in args.off_policy_corrections:
            return (
                "got --off-policy-corrections tis with --custom-tis-function-path, which only custom_tis calls; name "
                "custom_tis in its place, or drop the function"
            )
        return super().check(args)


@CORRECTIONS.register("tis_metrics")
@dataclass(frozen=True, kw_only=True)
class ReportedWeights(Weighing):
    """Reports the weights without applying them (`--get-mismatch-metrics`)."""

    switch: ClassVar[str] = "--get-mismatch-metrics"
    asked_by: ClassVar[str] = "get_mismatch_metrics"
    place: ClassVar[int] = 20

    @classmethod
    def asked_for(cls, settings: Any) -> bool:
        """Weights that act are reported anyway."""
        return bool(settings.get_mismatch_metrics and not settings.use_tis)

    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Correction`."""
        return loss, self.weights(tokens).metrics()


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Per-token results [R], detached."""

    weight: Tensor
    """What multiplies the policy loss; 1 where masked."""
    raw: Tensor
    """The ratio at its level before truncation or masking; 1 where masked."""
    truncated: Tensor
    """1.0 where the bounds changed the weight."""
    ratio_limited: Tensor
    """1.0 where the log-ratio of the token or the sum of its sequence hit its clamp."""

    def metrics(self) -> dict[str, Tensor]:
        """Metric name -> values [R]."""
        return {
            "tis": self.raw,
            "tis_clipfrac": self.truncated,
            "tis_abs": (self.raw - 1.0).abs(),
            "mismatch_clamped": self.ratio_limited,
        }


def importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    sequences: Sequences,
    *,
    level: Level = "token",
    mode: Mode = "truncate",
    low: float,
    high: float,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> ImportanceWeights:
    """exp(old - rollout) at `level`, bounded to [low, high] by `mode`. All inputs [R]; masked values cannot matter.

    What is masked does not enter the product or the mean of its sequence.
    """
    import torch

    log_ratio, limited = mismatch_log_ratio(old_log_probs, rollout_log_probs, mask, sequences, level, log_ratio_limit)
    raw = log_ratio.exp()
    outside = ((raw < low) | (raw > high)) & (mask > 0)
    if mode == "truncate":
        weight = torch.where(outside, raw.clamp(low, high), raw)
    elif mode == "mask":
        weight = torch.where(outside, torch.zeros_like(raw), raw)
    else:
        assert_never(mode)
    return ImportanceWeights(weight, raw, outside.to(raw.dtype), limited.to(raw.dtype))
