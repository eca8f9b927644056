"""Settings of a run: `parse_args(argv) -> Args`, and the user hooks that they name.

Imports no torch, transformers, Ray or engine, so that a wrong flag is reported immediately.
"""

from __future__ import annotations

from slime.settings.args import Args, Passthrough
from slime.settings.command_line import main_args, parse_args, run_or_exit
from slime.settings.hook_contracts import check_hooks, load_hook

__all__ = ["Args", "Passthrough", "check_hooks", "load_hook", "main_args", "parse_args", "run_or_exit"]
