"""Importance weights between engine and trainer: truncated (TIS; Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training") or masked (icepop, MIS; Ling team 2025, arXiv:2510.18855).

Tokens are sampled by an inference engine whose probabilities differ from the trainer's by rounding, precision or age.
The policy gradient is multiplied by w = p_trainer_old / p_engine, held in [low, high] ("truncate") or replaced by 0
outside of it ("mask"), without a gradient of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from slime.algorithms.log_ratio import LOG_RATIO_LIMIT
from slime.algorithms.off_policy import CORRECTIONS, MismatchCorrection, OffPolicyTokens
from slime.algorithms.off_policy.levels import Level, mismatch_log_ratio
from slime.core.errors import ConfigError
from slime.settings.fields import opt

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.sequences import Sequences
    from slime.settings import Args

MODES = ("truncate", "mask")


@dataclass(frozen=True, kw_only=True)
class WeightSettings:
    """How the weights are made; of those that act and of those that are only reported."""

    tis_clip: float = opt(2.0, ge=0)
    """Upper bound of the weight."""
    tis_clip_low: float = opt(0.0, ge=0)
    """Lower bound of the weight."""
    tis_level: Level = "token"
    """The weight of a token is its own, the product over its sequence, or the geometric mean of it."""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """A weight out of bounds becomes the bound (TIS), or zero (icepop, MIS)."""

    def check_bounds(self) -> None:
        """Raises `ConfigError` for bounds of no interval."""
        if self.tis_clip_low > self.tis_clip:
            raise ConfigError(
                f"got tis_clip_low {self.tis_clip_low} and tis_clip {self.tis_clip}, because no weight lies between "
                "them; give 0 <= low <= high"
            )

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
class ImportanceSampling(WeightSettings, MismatchCorrection):
    """Multiplies the policy loss by the weights."""

    switch: ClassVar[str] = "--use-tis without --custom-tis-function-path"

    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Correction`."""
        weights = self.weights(tokens)
        return loss * weights.weight, weights.metrics()

    def check(self, args: Args) -> None:
        """See `Correction`."""
        super().check(args)
        self.check_bounds()


@CORRECTIONS.register("tis_metrics")
@dataclass(frozen=True, kw_only=True)
class ReportedWeights(WeightSettings, MismatchCorrection):
    """Reports the weights without applying them (`--get-mismatch-metrics`)."""

    switch: ClassVar[str] = "--get-mismatch-metrics"

    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Correction`."""
        return loss, self.weights(tokens).metrics()

    def check(self, args: Args) -> None:
        """See `Correction`."""
        super().check(args)
        self.check_bounds()


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
    level: str = "token",
    mode: str = "truncate",
    low: float,
    high: float,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
) -> ImportanceWeights:
    """exp(old - rollout) at `level`, bounded to [low, high] by `mode`. All inputs [R]; masked values cannot matter.

    What is masked does not enter the product or the mean of its sequence. Raises `ConfigError` on an unknown level or
    mode.
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
        raise ConfigError(f"got --tis-mode {mode!r}; choose one of {', '.join(MODES)}")
    return ImportanceWeights(weight, raw, outside.to(raw.dtype), limited.to(raw.dtype))
