"""How to go on with a run that was stopped: the command line that resumes it from its last checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from slime.core.errors import CheckpointError
from slime.observability.start_record import hide_secrets
from slime.settings import Args
from slime.settings.parse import without
from slime.training.state import checkpoint

LEFT_OUT = ("load", "run_dir", "ckpt_step", "finetune")
"""Settings that a resume gives again or must not repeat: `--finetune` would take the weights alone and start over."""


def resume_command(command: Sequence[str], *, load: str, run_dir: str) -> str:
    """The command that resumes the run of `command` (`slime train ...`) from `load` and goes on in `run_dir`.

    Secrets are hidden.
    """
    program, loop, *flags = command
    kept = without(flags, *LEFT_OUT)
    return shlex.join(hide_secrets([program, loop, *kept, "--load", load, "--run-dir", run_dir]))


def how_to_resume(args: Args, *, stopped: bool) -> str:
    """One line for whoever stopped the run, or saw it fail; empty if there is nothing to go on with.

    `stopped`: by Ctrl-C or SIGTERM; then the line also says that nothing was saved.
    """
    if args.debug_rollout_only or args.num_rollout == 0:
        return ""
    try:
        found = checkpoint.find(Path(args.save)) if args.save else None
    except CheckpointError:
        return ""
    if found is None and not stopped:
        return ""
    if found is None:
        why = "no checkpoint is complete yet" if args.save else "there is no --save FOLDER"
        return f"nothing to resume from: {why}"
    if args.num_rollout is not None and found.rollout_id + 1 >= args.num_rollout:
        return ""
    command = resume_command(args.command, load=str(args.save), run_dir=str(args.run_dir))
    return f"{found.path.name} is saved; to go on with step {found.rollout_id + 2}: {command}"
