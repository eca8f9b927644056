"""docs/architecture.md and the import contracts draw the house that stands here."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.walks import Stop, walks

ROOT = Path(__file__).parents[3]
ROOMS = {p.name for p in (ROOT / "slime").iterdir() if (p / "__init__.py").exists()}
MAX_STOPS = 12
"""More files than that, and one thing is not in one place."""


def defined_in(file: Path) -> set[str]:
    """Names of functions and classes at any depth."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


@pytest.mark.parametrize("walk", walks().values(), ids=walks())
def test_a_walk_leads_past_what_is_there(walk: list[Stop]) -> None:
    assert 5 < len(walk) <= MAX_STOPS and len({stop.file for stop in walk}) == len(walk)
    for stop in walk:
        file = ROOT / "slime" / stop.file
        assert file.exists(), f"there is no slime/{stop.file}"
        missing = set(stop.read) - defined_in(file)
        assert not missing, f"slime/{stop.file} has no {sorted(missing)}"


def levels_of_document() -> Iterator[list[str]]:
    """Top to bottom."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    picture = re.search(r"## The rooms\n.*?```\n(.*?)```", text, re.S)
    assert picture is not None, "no picture of the rooms"
    for line in picture[1].splitlines():
        yield sorted(re.split(r" {3,}", line.strip())[0].split(" | "))


def levels_of_contracts() -> Iterator[list[str]]:
    """Top to bottom, of the rooms that exist."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    for line in contracts["importlinter:contract:layers"]["layers"].strip().splitlines():
        rooms = sorted(set(re.findall(r"slime\.(\w+)", line)) & ROOMS)
        if rooms:
            yield rooms


def test_the_picture_of_the_rooms_is_the_import_contract() -> None:
    levels = list(levels_of_document())
    assert levels == list(levels_of_contracts())
    assert {room for level in levels for room in level} == ROOMS - {"compat"}


def test_the_tree_and_the_table_of_rooms_are_what_is_here() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = text.split("\n## The rooms\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)/` \|", rooms, re.M)) == ROOMS
    tree = text.split("\n## The tree\n")[1].split("```")[1]
    folders = set(re.findall(r"^(\w+)/", tree, re.M))
    hidden = {"assets", "runs", "build", "dist", "shared", "__pycache__"}
    there = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")} - hidden
    assert folders == {name for name in there if not name.endswith(".egg-info")}


def test_the_table_of_extension_points_names_contracts() -> None:
    """Law: where the document says that a file is added, its contract stands."""
    section = (ROOT / "docs" / "architecture.md").read_text().split("## Where things are added")[1].split("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| `([\w/]+/)`[^|]*\| [^|]+ \| `(\w+)` \|$", section, re.M)
    assert len(rows) >= 8, "the table was not understood"
    for folder, contract in rows:
        files = (ROOT / "slime" / folder).glob("*.py")
        assert any(contract in defined_in(file) for file in files), f"no {contract} in slime/{folder}"
