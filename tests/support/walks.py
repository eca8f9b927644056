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


def _parts() -> dict[str, str]:
    """Heading -> what stands below it."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("\n## Three walks\n")[1].split("\n## ")[0]
    return {heading: rest for heading, _, rest in (part.partition("\n") for part in section.split("\n### ")[1:])}


def called_on(heading: str) -> set[str]:
    """Files below slime/ that the second table of a walk names: called on the way."""
    rows = re.findall(r"^\| (?!\d|called)[^|]*\|([^|]*)\|$", _parts()[heading], re.M)
    return {file for files in rows for file in re.findall(r"`([^`]+\.py)`", files)}


def walks() -> dict[str, list[Stop]]:
    """Heading -> its lines in order."""
    found = {}
    for heading, table in _parts().items():
        rows = re.findall(r"^\| \d+ \| `([^`]+)` \|[^|]*\|([^|]*)\|$", table, re.M)
        found[heading] = [Stop(file, tuple(re.findall(r"`(\w+)`", names))) for file, names in rows]
    return found
