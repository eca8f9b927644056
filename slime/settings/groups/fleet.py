"""The fleet: how engines are watched, what becomes of one that fails, and of a run that a fault ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.settings.fields import derived, opt
from slime.settings.group import Rule
from slime.settings.ranges import COUNT_OR_NONE, SECONDS, SECONDS_OR_NONE

if TYPE_CHECKING:
    from slime.settings.args import Args


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """Faults of engines, and of the run."""

    use_fault_tolerance: bool = True
    """An engine that ends, hangs or fails a weight sync alone is started again, gets the current weights, verified, and
    serves again, while the run goes on with the others. --no-use-fault-tolerance: the run ends."""
    rollout_health_check_interval: float = opt(5.0, within=SECONDS)
    """Seconds between two questions to an engine's scheduler. Its processes are looked at every second."""
    rollout_health_check_timeout: float = opt(30.0, within=SECONDS)
    """Seconds for which a scheduler may be silent, beside one interval, before its engine counts as hung: without a
    token for anybody and, on CPUs, without computing; more of them on a busy machine (docs/fleet.md)."""
    rollout_health_check_first_wait: float = derived(
        lambda s: 180.0 if s.device == "cuda" else None,
        "on a GPU the first requests compile kernels, and the scheduler answers nobody meanwhile",
        default=0.0,
        within=SECONDS_OR_NONE,
    )
    """Seconds before the first question to an engine that has just started. Default: 180 on cuda, else 0."""
    max_restarts: int = opt(0, within=COUNT_OR_NONE)
    """How often a run that a fault ended (a process or a host that is gone) starts again by itself, from its newest
    checkpoint; it needs --save, the same folder as --load, and --save-interval."""


def restarts_have_a_checkpoint(args: Args) -> str | None:
    """A start by itself is the same command once more: it has to go on where the one before was saved."""
    if not args.max_restarts:
        return None
    said = f"got max_restarts {args.max_restarts}"
    if args.save is None:
        return f"{said} without --save, so there would be nothing to go on from; give --save FOLDER --load FOLDER"
    dropped = args.load is None and "--load is --save" in args.origins.get("load", "")
    if not dropped and (args.load is None or Path(args.load).resolve() != Path(args.save).resolve()):
        given = f"--load {args.load}" if args.load else "no --load"
        return (
            f"{said} with --save {args.save} and {given}: every start loads what --load says, and the second one has "
            f"to find what the first one saved; give --load {args.save}, which may be empty at first"
        )
    if args.save_interval is None:
        return f"{said} without --save-interval: only the last step would be saved; give --save-interval STEPS"
    others = {"--ckpt-step": args.ckpt_step is not None, "--finetune": args.finetune}
    if again := [flag for flag, given in others.items() if given]:
        return f"{said} with {' and '.join(again)}, which would take every start back to the same step; leave it out"
    return None


RULES: tuple[Rule, ...] = (restarts_have_a_checkpoint,)
