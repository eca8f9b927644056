"""Corrections for tokens that another distribution sampled than the one that is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slime.settings.conditions import ENGINE_LOG_PROBS, POLICY_LOSS, POLICY_TERM, has_policy_term
from slime.settings.fields import Need, derived, opt
from slime.settings.group import Rule

if TYPE_CHECKING:
    from slime.settings.args import Args

Level = Literal["token", "sequence", "geometric"]

_OWN_WEIGHTS = Need(
    lambda s: not (s.use_tis and s.custom_tis_function_path is not None),
    "weights of slime's own; --custom-tis-function-path replaces them",
)
_WEIGHTS = (
    Need(
        lambda s: (s.use_tis and has_policy_term(s)) or (s.get_mismatch_metrics and s.loss_type == "policy_loss"),
        "--use-tis or --get-mismatch-metrics, with loss_type policy_loss",
    ),
    _OWN_WEIGHTS,
)
_REJECTION = (POLICY_TERM, Need(lambda s: s.rejection_level is not None, "--rejection-level"))
_OPSM = (POLICY_TERM, Need(lambda s: s.use_opsm, "--use-opsm"))


def chosen_corrections(s: Any) -> tuple[str, ...]:
    """The corrections that the switches ask for, in the order in which they act."""
    switches = {
        "custom_tis": s.use_tis and s.custom_tis_function_path,
        "tis": s.use_tis and not s.custom_tis_function_path,
        "tis_metrics": s.get_mismatch_metrics and not s.use_tis,
        "rejection": s.rejection_level,
        "opsm": s.use_opsm,
    }
    return tuple(name for name, is_on in switches.items() if is_on)


def _corrects_old_tokens(s: Any) -> bool | None:
    corrected = s.use_rollout_logprobs or s.rejection_level or s.custom_loss_function_path
    return True if s.fully_async and not corrected and has_policy_term(s) else None


@dataclass(frozen=True, kw_only=True)
class OffPolicySettings:
    """Weights and masks by w = p(trainer, before the update) / p(engine)."""

    use_rollout_logprobs: bool = opt(False, needs=ENGINE_LOG_PROBS)
    """The engine's log-probs are the old policy, instead of a forward pass of the trainer."""
    off_policy_corrections: tuple[str, ...] = derived(
        chosen_corrections,
        "the switches",
        chosen_from="slime.algorithms.off_policy:CORRECTIONS",
        needs=POLICY_TERM,
    )
    """What acts on the policy loss of tokens, in this order: names, or import paths of your own. Default: what
    --use-tis, --get-mismatch-metrics, --rejection-level and --use-opsm ask for."""
    use_tis: bool = derived(
        _corrects_old_tokens, "--fully-async trains on tokens of older weights", default=False, needs=POLICY_TERM
    )
    """Multiply the policy loss by the importance weight w."""
    tis_clip: float = opt(2.0, needs=_WEIGHTS)
    """Upper bound of the weight."""
    tis_clip_low: float = opt(0.0, needs=_WEIGHTS)
    """Lower bound of the weight."""
    tis_level: Level = opt("token", needs=_WEIGHTS)
    """The weight of a token is its own, the product over its sequence, or the geometric mean of it."""
    tis_mode: Literal["truncate", "mask"] = opt("truncate", needs=_WEIGHTS)
    """A weight out of bounds becomes the bound (TIS), or zero (icepop, MIS)."""
    rejection_level: Level | None = opt(None, needs=POLICY_TERM)
    """Leave tokens (or whole sequences) out of the loss whose w is out of bounds, apart from the weight."""
    rejection_low: float = opt(0.5, needs=_REJECTION)
    """Lower bound of an accepted w."""
    rejection_high: float = opt(2.0, needs=_REJECTION)
    """Upper bound of an accepted w."""
    rejection_veto: float | None = opt(None, ge=0, needs=_REJECTION)
    """A sequence with one token whose w is below this is left out."""
    use_opsm: bool = opt(False, needs=POLICY_TERM)
    """Leave out sequences with a negative advantage that drifted by more than opsm_delta (DeepSeek-V3.2,
    arXiv:2512.02556)."""
    opsm_delta: float = opt(1e-4, ge=0, needs=_OPSM)
    """Largest mean of old minus current log-prob of such a sequence."""
    get_mismatch_metrics: bool = opt(False, needs=(POLICY_LOSS, _OWN_WEIGHTS))
    """Report the weights of --use-tis without applying them."""


def bounds_are_intervals(args: Args) -> str | None:
    """Intervals of weights have a low and a high end."""
    pairs = [("tis_clip_low", "tis_clip"), ("rejection_low", "rejection_high")]
    if args.was_given("cispo_clip_low") or args.was_given("cispo_clip_high"):  # else made from eps_clip
        pairs.append(("cispo_clip_low", "cispo_clip_high"))
    wrong = [
        f"{a} {getattr(args, a)} and {b} {getattr(args, b)}"
        for a, b in pairs
        if not 0 <= getattr(args, a) <= getattr(args, b)
    ]
    return f"got {', '.join(wrong)}; give finite bounds with 0 <= low <= high" if wrong else None


def corrections_are_compatible(args: Args) -> str | None:
    """With the engine's log-probs as old policy every correction weight is one."""
    corrects = args.use_tis or args.rejection_level or args.get_mismatch_metrics
    if corrects and args.use_rollout_logprobs:
        return (
            "got --use-rollout-logprobs with --use-tis, --rejection-level or --get-mismatch-metrics, which compare "
            "them with the trainer's; give one of them"
        )
    return None


RULES: tuple[Rule, ...] = (bounds_are_intervals, corrections_are_compatible)
