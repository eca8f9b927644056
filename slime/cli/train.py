"""`slime train` and `slime train-async`: the loops `train.py` and `train_async.py`, with their own command line.

Every word after the command belongs to the loop, `--help` and `--explain` too.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from slime.core.errors import ConfigError
from slime.settings import run_or_exit


def add_flags(parser: argparse.ArgumentParser) -> None:
    """None: the loop parses its own."""


def run_sync(options: argparse.Namespace) -> int:
    """Generates and trains in turn. Exit codes are those of `run_or_exit`, raised as `SystemExit`."""
    from slime.cli.loops.train import train

    import_from_here()
    run_or_exit(train, options.words)
    return 0


def run_async(options: argparse.Namespace) -> int:
    """Generates while it trains. Exit codes are those of `run_or_exit`, raised as `SystemExit`."""
    from slime.cli.loops.train_async import train_async

    import_from_here()
    run_or_exit(train_async, options.words, synchronous=False)
    return 0


def import_from_here() -> None:
    """A user's module in the working folder can be named (`my_hooks:reward`), here and in every process of the run.

    PYTHONPATH comes before the standard library. Raises `ConfigError` for a module that would stand in for one of it.
    """
    here = str(Path.cwd())
    named = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if here not in named:
        _require_no_namesake(Path(here))
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *named])
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _require_no_namesake(folder: Path) -> None:
    """No module here has the name of one of Python's own, which the processes of a run would import in its place."""
    found = [path for path in sorted(folder.glob("*.py")) if path.stem in sys.stdlib_module_names]
    found += [
        path.parent for path in sorted(folder.glob("*/__init__.py")) if path.parent.name in sys.stdlib_module_names
    ]
    if found:
        raise ConfigError(
            f"got {found[0]}, because every process of the run would import it in place of Python's own "
            f"{found[0].stem}; rename it, or start the run in another folder"
        )
