"""Corrections for tokens that another distribution sampled than the one that is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slime.settings.conditions import ENGINE_LOG_PROBS, POLICY_LOSS, POLICY_TERM, has_policy_term
from slime.settings.fields import Need, derived, opt

Level = Literal["token", "sequence", "geometric"]

_OWN_WEIGHTS = Need(
    lambda s: not (s.use_tis and s.custom_tis_function_path is not None),
    "slime's own weights; --custom-tis-function-path replaces them",
)
_CORRECTED = Need(
    lambda s: has_policy_term(s) or (s.get_mismatch_metrics and s.loss_type == "policy_loss"), POLICY_TERM.text
)


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
        needs=_CORRECTED,
    )
    """What acts on the policy loss of tokens, in this order: names, or import paths of your own. Default: what
    --use-tis, --get-mismatch-metrics, --rejection-level and --use-opsm ask for."""
    use_tis: bool = derived(
        _corrects_old_tokens, "--fully-async trains on tokens of older weights", default=False, needs=POLICY_TERM
    )
    """Multiply the policy loss by the importance weight w."""
    rejection_level: Level | None = opt(None, needs=POLICY_TERM)
    """Leave tokens (or whole sequences) out of the loss whose w is out of bounds, apart from the weight."""
    use_opsm: bool = opt(False, needs=POLICY_TERM)
    """Leave out sequences with a negative advantage that drifted by more than opsm_delta (DeepSeek-V3.2,
    arXiv:2512.02556)."""
    get_mismatch_metrics: bool = opt(False, needs=(POLICY_LOSS, _OWN_WEIGHTS))
    """Report the weights of --use-tis without applying them."""
