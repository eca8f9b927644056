"""Running half of the loop, and recorded rollouts."""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.settings.conditions import fine_tunes
from slime.settings.fields import Adjusted, derived, opt
from slime.settings.group import Rule
from slime.settings.groups.hooks import SFT_ROLLOUT
from slime.settings.held_out import loss_datasets, samples_evaluations

if TYPE_CHECKING:
    from slime.settings.args import Args

_PICKLE, _RECORD = ".pt", ".jsonl.zst"
"""Endings of the public slime's records, and of ours."""


def _trains_only(s: Any) -> bool | None:
    if s.load_debug_rollout_data:
        return True
    try:
        needs_no_engine = fine_tunes(s) and s.rollout_function_path == SFT_ROLLOUT and not samples_evaluations(s)
    except ConfigError:  # a rule tells it
        return None
    return True if needs_no_engine else None


def _why_trains_only(s: Any) -> str:
    if s.load_debug_rollout_data:
        return "--load-debug-rollout-data replays rollouts"
    return "supervised fine-tuning needs no engine, unless an evaluation samples"


def _below_details(s: Any, kind: str, ending: str) -> str | None:
    if s.dump_details is None:
        return None
    return str(Path(s.dump_details) / f"{kind}_data" / f"{{rollout_id}}.{ending}")


def _as(ending: str) -> Callable[[Any, Any], Adjusted | None]:
    """Files of pickles are neither written nor read: the same path, with the ending of what is."""

    def adjust(path: Any, s: Any) -> Adjusted | None:
        if not str(path).endswith(_PICKLE) or Path(path).is_file():
            return None
        return Adjusted(str(path).removesuffix(_PICKLE) + ending, f"{_PICKLE} would be a pickle; records are {ending}")

    return adjust


@dataclass(frozen=True, kw_only=True)
class DebugSettings:
    """Debugging aids."""

    debug_rollout_only: bool = False
    """Generate and grade; no trainer is started. With --num-rollout 0 and nothing to evaluate, engines and router serve
    until Ctrl-C."""
    debug_train_only: bool = derived(_trains_only, _why_trains_only, default=False)
    """Train; no engine is started. Needs --load-debug-rollout-data, or an SFT rollout function."""
    save_debug_rollout_data: str | None = derived(
        lambda s: _below_details(s, "rollout", "jsonl.zst"), "--dump-details", adjust=_as(_RECORD)
    )
    """Write every rollout here; {rollout_id} in the path is replaced, by eval_STEP_NAME for an evaluation. Files are
    compressed JSON lines: a path that ends in .pt gets the ending .jsonl.zst."""
    save_debug_train_data: str | None = derived(
        lambda s: _below_details(s, "train", "npz"), "--dump-details", adjust=_as(".npz")
    )
    """Write every batch for the trainer here, as numpy's .npz, which a path that ends in .pt gets as its ending;
    {rollout_id} in the path is replaced."""
    dump_details: str | None = None
    """Folder for all of this: sets both --save-debug-... paths and gets the tokenizer."""
    load_debug_rollout_data: str | None = opt(None, adjust=_as(_RECORD))
    """Replay rollouts written by --save-debug-rollout-data, with the same path, instead of generating; implies
    --debug-train-only."""
    load_debug_rollout_data_subsample: float | None = opt(None, gt=0, le=1)
    """Replay only this part of each rollout's groups, half from its head and half from its tail."""


def halves_are_compatible(args: Args) -> str | None:
    """A run cannot be rollout-only and train-only at once."""
    if args.debug_rollout_only and args.debug_train_only:
        return "got rollout-only and train-only together, so nothing would run; give one of them"
    part = args.load_debug_rollout_data_subsample
    if part is not None and not (0 < part <= 1 and args.load_debug_rollout_data):
        return f"got load_debug_rollout_data_subsample {part}; give 0 < part <= 1 with --load-debug-rollout-data"
    return None


def losses_have_a_trainer(args: Args) -> str | None:
    """The loss of held-out conversations is the trainer's."""
    if not args.debug_rollout_only or not (names := [one.name for one in loss_datasets(args)]):
        return None
    return (
        f"got --debug-rollout-only with held-out conversations ({', '.join(names)}), whose loss the trainer measures; "
        "drop one of the two, or give --rm-type to score sampled answers"
    )


def records_are_no_pickles(args: Args) -> str | None:
    """A record of the public slime runs code when it is read. A template names it if no record of ours is there."""
    path = args.load_debug_rollout_data
    if path is None or (not path.endswith(_PICKLE) and _there(path)):
        return None
    found = _there(path.removesuffix(_RECORD).removesuffix(_PICKLE) + _PICKLE)
    if not found:
        return None
    return (
        f"got load_debug_rollout_data {path}, for which there is {found[0]}, a pickle, which could run code; give what "
        "--save-debug-rollout-data of this slime wrote, or make that of it: "
        f"slime convert {found[0]} {found[0].removesuffix(_PICKLE)}{_RECORD} --trust-pickle"
    )


def _there(template: str) -> list[str]:
    """The files that a template with `{rollout_id}` names."""
    return sorted(glob.glob(glob.escape(template).replace("{rollout_id}", "*")))


RULES: tuple[Rule, ...] = (records_are_no_pickles, halves_are_compatible, losses_have_a_trainer)
