"""What a command of `slime` is: a row of the table in `slime/cli/main.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Command:
    """One command. Its file is light on import: what is heavy is imported by `run`."""

    name: str
    """The word after `slime`."""
    help: str
    """One line for `slime --help`."""
    add_flags: Callable[[argparse.ArgumentParser], None]
    """Declares its positionals and flags."""
    run: Callable[[argparse.Namespace], int]
    """Does it; returns the exit code (0 well, 1 something is wrong, 2 wrong usage)."""
    words: Literal["own", "more", "all"] = "own"
    """Which words it takes: those that `add_flags` declares; further ones too, which arrive as `options.words` in their
    order; or every word after its name, as `options.words`, `--help` included."""
