"""Corrections for tokens that another distribution sampled than the one that is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slime.settings.fields import derived

Level = Literal["token", "sequence", "geometric"]


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


@dataclass(frozen=True, kw_only=True)
class OffPolicyArgs:
    """Weights and masks by w = p(trainer, before the update) / p(engine)."""

    use_rollout_logprobs: bool = False
    """The engine's log-probs are the old policy, instead of a forward pass of the trainer."""
    off_policy_corrections: tuple[str, ...] = derived(
        chosen_corrections, "the switches", chosen_from="slime.algorithms.off_policy:CORRECTIONS"
    )
    """What acts on the policy loss of tokens, in this order: names, or import paths of your own. Default: what
    --use-tis, --get-mismatch-metrics, --rejection-level and --use-opsm ask for."""
    use_tis: bool = False
    """Multiply the policy loss by the importance weight w."""
    tis_clip: float = 2.0
    """Upper bound of the weight."""
    tis_clip_low: float = 0.0
    """Lower bound of the weight."""
    tis_level: Level = "token"
    """The weight of a token is its own, the product over its sequence, or the geometric mean of it."""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """A weight out of bounds becomes the bound (TIS), or zero (icepop, MIS)."""
    rejection_level: Level | None = None
    """Leave tokens (or whole sequences) out of the loss whose w is out of bounds, apart from the weight."""
    rejection_low: float = 0.5
    """Lower bound of an accepted w."""
    rejection_high: float = 2.0
    """Upper bound of an accepted w."""
    rejection_veto: float | None = None
    """A sequence with one token whose w is below this is left out."""
    use_opsm: bool = False
    """Leave out sequences with a negative advantage that drifted by more than opsm_delta (DeepSeek-V3.2,
    arXiv:2512.02556)."""
    opsm_delta: float = 1e-4
    """Largest mean of old minus current log-prob of such a sequence."""
    get_mismatch_metrics: bool = False
    """Report the weights of --use-tis without applying them."""
