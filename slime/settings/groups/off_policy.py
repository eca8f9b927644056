"""Corrections for tokens that another distribution sampled than the one that is trained.

What acts is --off-policy-corrections. Where that is not given, the switches make the list; where it is given, it says
what the switches are. So settings and run agree either way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slime.core.registry import load_object
from slime.settings.conditions import (
    ENGINE_LOG_PROBS,
    POLICY_LOSS,
    POLICY_TERM,
    has_policy_term,
    minimises_policy_loss,
)
from slime.settings.fields import Need, derived, opt
from slime.settings.group import Rule

if TYPE_CHECKING:
    from slime.settings.args import Args

Level = Literal["token", "sequence", "geometric"]
"""Whose ratio is compared: the token's own, the product over its sequence, or the geometric mean of it."""

CORRECTIONS = "slime.algorithms.off_policy:CORRECTIONS"
"""The registry of corrections, which stands above the settings."""

_OWN_WEIGHTS = Need(
    lambda s: not (s.use_tis and s.custom_tis_function_path is not None),
    "slime's own weights; --custom-tis-function-path replaces them",
)
_CORRECTED = Need(
    lambda s: has_policy_term(s) or (s.get_mismatch_metrics and minimises_policy_loss(s)), POLICY_TERM.text
)
_LIST = "off_policy_corrections"


def asked_for(s: Any) -> tuple[str, ...]:
    """The corrections that the switches ask for, in the order in which they act."""
    found = [(entry.place, name) for name, entry in load_object(CORRECTIONS) if entry.asked_for(s)]
    return tuple(name for _, name in sorted(found))


def _listed(s: Any) -> list[Any]:
    """The entries that the settings name."""
    registry = load_object(CORRECTIONS)
    return [registry.get(name) for name in s.off_policy_corrections]


def _as_listed(switch: str) -> Callable[[Any], bool | None]:
    """Whether a given list has a correction of that switch; None without a list."""
    return lambda s: any(e.asked_by == switch for e in _listed(s)) if s.was_given(_LIST) else None


def _uses_tis(s: Any) -> bool | None:
    if s.was_given(_LIST):
        return _as_listed("use_tis")(s)
    corrected = s.use_rollout_logprobs or s.rejection_level or s.custom_loss_function_path
    return True if s.fully_async and not corrected and has_policy_term(s) else None


def _why_tis(s: Any) -> str:
    return _BY_LIST if s.was_given(_LIST) else "--fully-async trains on tokens of older weights"


_BY_LIST = "--off-policy-corrections"


@dataclass(frozen=True, kw_only=True)
class OffPolicySettings:
    """Weights and masks by w = p(trainer, before the update) / p(engine)."""

    use_rollout_logprobs: bool = opt(False, needs=ENGINE_LOG_PROBS)
    """The engine's log-probs are the old policy, instead of a forward pass of the trainer."""
    off_policy_corrections: tuple[str, ...] = derived(
        asked_for, "the switches", chosen_from=CORRECTIONS, needs=_CORRECTED
    )
    """What acts on the policy loss of tokens, in this order: names, or import paths of your own. Default: what
    --use-tis, --get-mismatch-metrics, --rejection-level and --use-opsm ask for."""
    use_tis: bool = derived(_uses_tis, _why_tis, default=False, needs=POLICY_TERM)
    """Multiply the policy loss by the importance weight w."""
    rejection_level: Level | None = opt(None, needs=POLICY_TERM)
    """Leave tokens (or whole sequences) out of the loss whose w is out of bounds, apart from the weight."""
    use_opsm: bool = derived(_as_listed("use_opsm"), _BY_LIST, default=False, needs=POLICY_TERM)
    """Leave out sequences with a negative advantage that drifted by more than opsm_delta (DeepSeek-V3.2,
    arXiv:2512.02556)."""
    get_mismatch_metrics: bool = derived(
        _as_listed("get_mismatch_metrics"), _BY_LIST, default=False, needs=(POLICY_LOSS, _OWN_WEIGHTS)
    )
    """Report the weights of --use-tis without applying them."""


def switches_and_list_agree(args: Args) -> str | None:
    """What the switches ask for is in a given list, once; what is switched off is not."""
    listed, words = _listed(args), " ".join(args.off_policy_corrections)
    twice = [name for name, entry in zip(args.off_policy_corrections, listed, strict=True) if listed.count(entry) > 1]
    if twice:
        return f"got --off-policy-corrections {words}, which would apply {twice[0]} twice; name it once"
    if not args.was_given(_LIST):
        return None
    acting = {entry.asked_by for entry in listed}
    registry = load_object(CORRECTIONS)
    left_out = [name for name in asked_for(args) if registry.get(name).asked_by not in acting]
    if left_out:
        name = left_out[0]
        return (
            f"got {_flag(registry.get(name).asked_by)} with --off-policy-corrections {words}, which does not name "
            f"{name}: it would not act; add {name} to the list, or drop the switch"
        )
    for entry in listed:
        if entry.asked_by and args.was_given(entry.asked_by) and not getattr(args, entry.asked_by):
            return (
                f"got {_flag(entry.asked_by, 'no-')} with --off-policy-corrections {words}, which names {entry.name}; "
                "take it from the list, or drop the switch"
            )
    return None


def _flag(setting: str, off: str = "") -> str:
    return f"--{off}{setting.replace('_', '-')}"


RULES: tuple[Rule, ...] = (switches_and_list_agree,)
