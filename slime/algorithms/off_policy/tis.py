"""Importance weights between engine and trainer: truncated (TIS; Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training") or masked (icepop, MIS; Ling team 2025, arXiv:2510.18855).

The token probabilities of the engine differ slightly from the trainer's, due to rounding, precision or older weights.
The policy gradient is multiplied by w = p_trainer_old / p_engine, which has no gradient. w is clipped to [low, high]
("truncate") or set to 0 outside this range ("mask").

The ratio is computed at one `Level`. token: the ratio of the token. sequence: the product over the trained tokens of
the sequence, an exact importance weight, but with a variance that grows with length. geometric: their geometric mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, assert_never

from slime.algorithms.off_policy import CORRECTIONS, MismatchCorrection, OffPolicyTokens
from slime.algorithms.token_losses import LOG_RATIO_LIMIT, clamp_counted, clamped_log_ratio, unmasked
from slime.core.errors import HookError
from slime.settings.args import for_hook
from slime.settings.fields import opt
from slime.settings.flags import BOUND
from slime.settings.groups.algorithm import Level
from slime.settings.hook_contracts import load_hook

if TYPE_CHECKING:
    from torch import Tensor

    from slime.algorithms.token_losses import Sequences
    from slime.settings import Args

FLAG = "--custom-tis-function-path"


@CORRECTIONS.register("custom_tis")
@dataclass(frozen=True, kw_only=True)
class CustomWeights(MismatchCorrection):
    """Calls the user's function with lists, one entry per sample. It returns the new loss, masks per sample and
    metrics [R]."""

    switch: ClassVar[str] = FLAG
    asked_by: ClassVar[str] = "use_tis"
    place: ClassVar[int] = 10

    @classmethod
    def asked_for(cls, settings: Any) -> bool:
        """Replaces `tis` if the user's function is set."""
        return bool(settings.use_tis and settings.custom_tis_function_path)

    def check(self, args: Args) -> str | None:
        if not args.custom_tis_function_path:
            return f"--off-policy-corrections custom_tis needs {FLAG}; set it to the import path of a function"
        return super().check(args)

    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Raises `HookError` if the function violates its contract."""
        import torch

        assert tokens.args.custom_tis_function_path is not None, "required by `check`"
        result = load_hook(tokens.args.custom_tis_function_path, "tis")(
            args=for_hook(tokens.args),
            pg_loss=loss,
            train_log_probs=list(tokens.trainer_log_probs.split(tokens.lengths)),
            rollout_log_probs=list(tokens.rollout_log_probs.split(tokens.lengths)),
            loss_masks=list(tokens.mask.split(tokens.lengths)),
            total_lengths=list(tokens.total_lengths),
            response_lengths=list(tokens.lengths),
        )
        if not isinstance(result, tuple) or len(result) != 3:
            raise HookError(f"{FLAG} must return (pg_loss, masks, metrics), got {type(result).__name__}")
        changed, masks, metrics = result
        if changed.shape != loss.shape or [len(m) for m in masks] != list(tokens.lengths):
            raise HookError(
                f"{FLAG} must return a loss of shape {list(loss.shape)} and masks of {list(tokens.lengths)} tokens, "
                f"got shape {list(changed.shape)} and masks of {[len(m) for m in masks]} tokens"
            )
        keep = torch.cat([torch.as_tensor(m) for m in masks]) if masks else torch.zeros_like(tokens.mask)
        kept = (keep.to(tokens.mask.device) > 0) & (tokens.mask > 0)
        changed = torch.where(kept, changed, torch.zeros_like(changed))
        return changed, {str(name): torch.as_tensor(value).float() for name, value in metrics.items()}


def mismatch_log_ratio(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, sequences: Sequences, level: Level, limit: float
) -> tuple[Tensor, Tensor]:
    """Returns (log-ratio at `level` [R], detached and zero where masked; bool [R], where it was clamped).

    The clamp to +-`limit` applies to each token and to the sum over a sequence.
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


Mode = Literal["truncate", "mask"]


@dataclass(frozen=True, kw_only=True)
class Weighing(MismatchCorrection):
    """Base of `tis` and `tis_metrics`: computes the importance weights."""

    tis_clip: float = opt(2.0, within=BOUND)
    """Upper bound of the importance weight."""
    tis_clip_low: float = opt(0.0, within=BOUND)
    """Lower bound of the importance weight."""
    tis_level: Level = "token"
    """token: one weight per token; sequence: the product over the sequence; geometric: the geometric mean over it."""
    tis_mode: Mode = "truncate"
    """What happens to a weight out of bounds: clip it (truncate: TIS) or set it to zero (mask: icepop, MIS)."""

    def check(self, args: Args) -> str | None:
        if self.tis_clip_low > self.tis_clip:
            return f"--tis-clip-low {self.tis_clip_low} and --tis-clip {self.tis_clip} must satisfy 0 <= low <= high"
        return super().check(args)

    def weights(self, tokens: OffPolicyTokens) -> ImportanceWeights:
        """Computes the weights of tokens that an engine sampled; 1 elsewhere."""
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
    """Multiplies the policy loss by the importance weights."""

    switch: ClassVar[str] = "--use-tis without --custom-tis-function-path"
    asked_by: ClassVar[str] = "use_tis"
    place: ClassVar[int] = 10

    @classmethod
    def asked_for(cls, settings: Any) -> bool:
        return bool(settings.use_tis and not settings.custom_tis_function_path)

    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        weights = self.weights(tokens)
        return loss * weights.weight, weights.metrics()

    def check(self, args: Args) -> str | None:
        if args.custom_tis_function_path and "custom_tis" not in args.off_policy_corrections:
            return (
                "--custom-tis-function-path has no effect with --off-policy-corrections tis; use custom_tis instead, "
                "or drop the flag"
            )
        return super().check(args)


@CORRECTIONS.register("tis_metrics")
@dataclass(frozen=True, kw_only=True)
class ReportedWeights(Weighing):
    """Reports the importance weights without applying them (`--get-mismatch-metrics`)."""

    switch: ClassVar[str] = "--get-mismatch-metrics"
    asked_by: ClassVar[str] = "get_mismatch_metrics"
    place: ClassVar[int] = 20

    @classmethod
    def asked_for(cls, settings: Any) -> bool:
        """Off with --use-tis, which reports its weights anyway."""
        return bool(settings.get_mismatch_metrics and not settings.use_tis)

    def apply(self, loss: Tensor, tokens: OffPolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        return loss, self.weights(tokens).metrics()


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Importance weights and related per-token values [R], detached."""

    weight: Tensor
    """The factor for the policy loss; 1 where masked."""
    raw: Tensor
    """The ratio at the chosen level, before truncation or masking; 1 where masked."""
    truncated: Tensor
    """1.0 where the ratio was out of bounds."""
    ratio_limited: Tensor
    """1.0 where the log-ratio of the token, or its sum over the sequence, was clamped."""

    def metrics(self) -> dict[str, Tensor]:
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
    """Computes exp(old - rollout) at `level`, bounded to [low, high] by `mode`. All inputs are [R]."""
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
