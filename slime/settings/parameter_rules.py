"""The rules of what is trained, of adapters and of copies."""

from __future__ import annotations

import math
import re

from slime.settings.args import Args
from slime.settings.rules import Rule

_PATTERNS = ("only_train_params_name_list", "freeze_params_name_list", "lora_target_modules")


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
                return f"got {name} {pattern!r}, which is no regular expression ({error}); correct it"
    return None


def adapters_have_a_size(args: Args) -> str | None:
    """An adapter of rank 0 or scale 0 is none."""
    if args.lora_rank is not None and args.lora_rank < 1:
        return f"got lora_rank {args.lora_rank}; give a rank of at least 1, or leave it out to train the model itself"
    if args.lora_alpha is not None and not 0 < args.lora_alpha < math.inf:
        return f"got lora_alpha {args.lora_alpha}; give a number > 0"
    return None


PARAMETER_RULES: tuple[Rule, ...] = (one_way_to_say_what_is_trained, patterns_are_regexes, adapters_have_a_size)
