"""Small commands: `slime recipe` and `slime tokenizer`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from slime.core.errors import ConfigError

# `slime recipe NAME [flags]`: runs a recipe of `recipes/` in the working folder; further flags are for the loop.

RECIPES = Path(__file__).parent / "recipes"


def names() -> list[str]:
    """The recipes that there are."""
    return sorted(script.parent.name for script in RECIPES.glob("*/run.sh"))


def add_recipe_flags(parser: argparse.ArgumentParser) -> None:
    """Which one."""
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(names())}; flags behind it are for the loop")


def run_recipe(options: argparse.Namespace) -> int:
    """Becomes the recipe's script, which prepares its model and data here and starts `slime train`."""
    if options.name not in names():
        raise ConfigError(f"got the recipe {options.name}; there are {', '.join(names())}")
    script = RECIPES / options.name / "run.sh"
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, (*_roots(), os.environ.get("PYTHONPATH"))))}
    os.execvpe("bash", ["bash", str(script), *options.words], {**os.environ, "PY": sys.executable, **environment})


def _roots() -> list[str]:
    """Where this slime is imported from, for an interpreter that would find another one or none."""
    return [str(Path(__file__).parents[2])]


# `slime tokenizer DIR`: a tokenizer.json for a released folder whose tokenizer is code, which is not run.


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="a released folder of Kimi-K2")


def run_tokenizer(options: argparse.Namespace) -> int:
    """Writes the files beside the released ones. Raises `ConfigError` for another tokenizer."""
    from slime.core.files import FAST
    from slime.data.checkpoint_template import KEPT, write_fast

    if not options.folder.is_dir():
        raise ConfigError(f"got {options.folder}, which is not a folder; give a released folder of Kimi-K2")
    num_ids = write_fast(options.folder)
    print(f"{options.folder / FAST}: {num_ids} ids; the released configuration is kept as {KEPT}")
    return 0
