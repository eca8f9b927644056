"""Run settings: `parse_args(argv) -> Args`, and the loading of the user hooks that they name.

Does not import torch, transformers, Ray or an engine, so an invalid flag is reported immediately.
"""

from __future__ import annotations

from slime.settings.args import Args, Passthrough, for_hook
from slime.settings.command_line import main_args, parse_args, run_or_exit
from slime.settings.hook_contracts import check_hooks, load_hook

__all__ = ["Args", "Passthrough", "check_hooks", "for_hook", "load_hook", "main_args", "parse_args", "run_or_exit"]
