"""Cross-checks: what cannot work is refused before any process starts. One small function per rule.

A rule returns None, or what was got, because of what it cannot work, and what to do. All broken rules are reported in
one error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slime.core.errors import ConfigError
from slime.settings.algorithm_rules import ALGORITHM_RULES
from slime.settings.args import Args
from slime.settings.file_rules import FILE_RULES
from slime.settings.loop_rules import async_rules, sync_rules
from slime.settings.parameter_rules import PARAMETER_RULES
from slime.settings.reward_rules import REWARD_RULES
from slime.settings.rules import RULES

Rule = Callable[[Args], "str | None"]

REQUIRED = {
    "hf_checkpoint": "--hf-checkpoint DIR names the model",
    "rollout_batch_size": "--rollout-batch-size N is the number of prompts per step",
}


def check_required(values: Mapping[str, Any]) -> None:
    """Raises `ConfigError` naming every required setting that is missing."""
    missing = [
        text
        for name, text in REQUIRED.items()
        if values[name] in (None, "") and (name != "rollout_batch_size" or values["num_rollout"] != 0)
    ]
    if values["num_rollout"] is None and values["num_epoch"] is None:
        missing.append("--num-rollout N (or --num-epoch N) is the length of the run")
    if missing:
        raise ConfigError("required settings are missing: " + "; ".join(missing))


def validate(args: Args, *, synchronous: bool = True, problems: Iterable[str] = ()) -> None:
    """Raises one `ConfigError` with `problems` and the message of every broken rule."""
    found = list(problems)
    rules = (*RULES, *ALGORITHM_RULES, *PARAMETER_RULES, *FILE_RULES, *REWARD_RULES)
    for rule in (*rules, *(sync_rules() if synchronous else async_rules())):
        try:
            message = rule(args)
        except ConfigError as error:  # of a value that several rules read: told once
            message = str(error)
        if message is not None and message not in found:
            found.append(message)
    if len(found) == 1:
        raise ConfigError(found[0])
    if found:
        raise ConfigError(f"{len(found)} problems:" + "".join(f"\n  {i}. {text}" for i, text in enumerate(found, 1)))
