"""`slime train` and `slime train-async`: the loops `train.py` and `train_async.py`, with their own command line; and
`slime recipe`, which runs a recipe that comes with slime.

All arguments after the command go to the loop, including `--help` and `--explain`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from slime.core.errors import ConfigError
from slime.settings import run_or_exit


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds nothing, because the loop parses its flags itself."""


def run_sync(options: argparse.Namespace) -> int:
    """Alternates generation and training. Exits with `SystemExit`, like `run_or_exit`."""
    from slime.cli.loops.train import train

    import_from_here()
    run_or_exit(train, options.words)
    return 0


def run_async(options: argparse.Namespace) -> int:
    """Generates while it trains. Exits with `SystemExit`, like `run_or_exit`."""
    from slime.cli.loops.train_async import train_async

    import_from_here()
    run_or_exit(train_async, options.words, synchronous=False)
    return 0


def import_from_here() -> None:
    """Lets every process of the run import users' modules from the working folder (`my_hooks:reward`).

    PYTHONPATH precedes the standard library, so a module that would shadow one of Python's raises `ConfigError`.
    """
    here = str(Path.cwd())
    named = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if here not in named:
        _require_no_namesake(Path(here))
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *named])
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _require_no_namesake(folder: Path) -> None:
    modules = [*sorted(folder.glob("*.py")), *(path.parent for path in sorted(folder.glob("*/__init__.py")))]
    found = next((path for path in modules if path.stem in sys.stdlib_module_names), None)
    if found is not None:
        raise ConfigError(
            f"every process of the run would import {found} instead of Python's own {found.stem}; rename the file, or "
            "start the run in a different folder"
        )


RECIPES = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    return sorted(script.parent.name for script in RECIPES.glob("*/run.sh"))


def add_recipe_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help=f"{', '.join(recipe_names())}; flags after it are passed to the loop"
    )


def run_recipe(options: argparse.Namespace) -> int:
    """Replaces this process with the recipe's script.

    The script prepares model and data in the working folder and starts `slime train`. Raises `ConfigError` for an
    unknown recipe and for wrong flags, before anything is prepared.
    """
    from slime.settings.command_line import EXPLAIN, parse_words

    if options.name not in recipe_names():
        raise ConfigError(f"there is no recipe {options.name}; choose from {', '.join(recipe_names())}")
    import_from_here()
    parse_words([word for word in options.words if word != EXPLAIN])
    script = RECIPES / options.name / "run.sh"
    this_slime = str(Path(__file__).parents[2])  # the script's interpreter might import a different slime
    path = os.pathsep.join(filter(None, (this_slime, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PY": sys.executable, "PYTHONPATH": path}
    os.execvpe("bash", ["bash", str(script), *options.words], environment)
