"""`slime recipe`: runs a recipe that comes with slime."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from slime.core.errors import ConfigError

RECIPES = Path(__file__).parent / "recipes"


def names() -> list[str]:
    return sorted(script.parent.name for script in RECIPES.glob("*/run.sh"))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(names())}; flags after it are passed to the loop")


def run(options: argparse.Namespace) -> int:
    """Replaces this process with the recipe's script.

    The script prepares model and data in the working folder and starts `slime train`. Raises `ConfigError` for an
    unknown recipe and for wrong flags, before anything is prepared.
    """
    from slime.cli.loop_commands import import_from_here
    from slime.settings.command_line import EXPLAIN, parse_words

    if options.name not in names():
        raise ConfigError(f"there is no recipe {options.name}; choose from {', '.join(names())}")
    import_from_here()
    parse_words([word for word in options.words if word != EXPLAIN])
    script = RECIPES / options.name / "run.sh"
    this_slime = str(Path(__file__).parents[2])  # the script's interpreter might import a different slime
    path = os.pathsep.join(filter(None, (this_slime, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PY": sys.executable, "PYTHONPATH": path}
    os.execvpe("bash", ["bash", str(script), *options.words], environment)
