"""The walks of docs/architecture.md: one thing, followed through the files that touch it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Stop:
    """One line of a walk."""

    file: str
    """Below slime/."""
    read: tuple[str, ...]
    """Functions and classes that the line names."""


def walks() -> dict[str, list[Stop]]:
    """Heading -> its lines in order."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("\n## Three walks\n")[1].split("\n## ")[0]
    found = {}
    for part in section.split("\n### ")[1:]:
        heading, _, table = part.partition("\n")
        rows = re.findall(r"^\| \d+ \| `([^`]+)` \|[^|]*\|([^|]*)\|$", table, re.M)
        found[heading] = [Stop(file, tuple(re.findall(r"`(\w+)`", names))) for file, names in rows]
    return found
