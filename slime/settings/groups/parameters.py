"""Which parameters are trained, adapters, the moving reference and the old policy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.settings.conditions import REFERENCE, fine_tunes
from slime.settings.fields import Need, opt
from slime.settings.group import Rule
from slime.settings.ranges import COUNT, STEPS

if TYPE_CHECKING:
    from slime.settings.args import Args

_ADAPTERS = Need(lambda s: s.lora_rank is not None, "--lora-rank")
_OLD_ACTOR = (
    Need(
        lambda s: not fine_tunes(s) and not s.use_rollout_logprobs,
        "old log-probs of the trainer: loss_type policy_loss or custom_loss, without --use-rollout-logprobs",
    ),
    Need(lambda s: not s.debug_train_only, "engines, to which weights are synced"),
)
_PATTERNS = ("only_train_params_name_list", "freeze_params_name_list", "lora_target_modules")


@dataclass(frozen=True, kw_only=True)
class ParameterSettings:
    """Patterns are regexes (`re.search`) on a parameter's Megatron name or any HF name of its table row; docs/lora.md.

    They concern the policy; a critic trains all of its parameters.
    """

    only_train_params_name_list: tuple[str, ...] | None = None
    """Train the parameters that one of these patterns matches, and freeze all others."""
    freeze_params_name_list: tuple[str, ...] | None = None
    """Freeze the parameters that one of these patterns matches."""
    lora_rank: int | None = opt(None, within=COUNT)
    """Freeze the model and train adapters of this rank on its linear layers (LoRA, arXiv:2106.09685). Exports and the
    weight sync merge them."""
    lora_alpha: float | None = opt(None, needs=_ADAPTERS, gt=0, le=1_000_000)
    """Adapters are scaled by lora_alpha / lora_rank. Default: twice the rank, so by 2 whatever the rank is."""
    lora_target_modules: tuple[str, ...] | None = opt(None, needs=_ADAPTERS)
    """Linear layers that get an adapter. Default: all of attention and MLP, experts included. The routed experts of a
    layer get one each as soon as one of them matches."""
    ref_update_interval: int | None = opt(None, needs=REFERENCE, within=STEPS)
    """Copy the policy into the reference every N rollouts. Default: the reference stays as it is."""
    keep_old_actor: bool = opt(False, needs=_OLD_ACTOR)
    """Old log-probs come from a copy of the weights that the batch was sampled under, which train_async.py has left
    behind. Default: from the weights before the update."""


def one_way_to_say_what_is_trained(args: Args) -> str | None:
    """Two lists, or a list and adapters, which freeze the model, would contradict each other."""
    ways = ("only_train_params_name_list", "freeze_params_name_list", "lora_rank")
    given = [f"--{n.replace('_', '-')}" for n in ways if getattr(args, n)]
    if len(given) < 2:
        return None
    return (
        f"got {' and '.join(given)} together, which each say what is trained; give one of them "
        "(--lora-target-modules chooses among adapters)"
    )


def patterns_are_regexes(args: Args) -> str | None:
    """Names are matched with `re.search`."""
    for name in _PATTERNS:
        for pattern in getattr(args, name) or ():
            try:
                re.compile(pattern)
            except re.error as error:
                return f"got {name} {pattern!r}, which is not a regular expression ({error}); correct it"
    return None


RULES: tuple[Rule, ...] = (one_way_to_say_what_is_trained, patterns_are_regexes)
