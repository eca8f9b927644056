"""Settings of a run: `parse_args(argv) -> Args`, and the user hooks that they name.

Light on purpose: a wrong flag is answered without importing torch, transformers, Ray or an engine.
"""

from __future__ import annotations

from slime.settings.args import Args, Passthrough
from slime.settings.hooks import check_hooks, load_hook
from slime.settings.parse import main_args, parse_args, run_or_exit

__all__ = ["Args", "Passthrough", "check_hooks", "load_hook", "main_args", "parse_args", "run_or_exit"]
