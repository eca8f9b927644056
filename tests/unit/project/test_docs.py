"""What the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime.settings.schema import owned_spellings
from slime.settings.table import flag_table

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = re.compile(r"`((?:[\w.-]+/)+(?:[\w-]+\.(?:py|txt|sh|md))?)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)\)")
MAKE = re.compile(r"\bmake ([a-z-]+)")
FLAG = re.compile(r"`(--[a-z][a-z0-9-]+)")
KNOWN = {*flag_table().by_name, *owned_spellings(), "--help", "--version", "--explain", "--name", "--no-name"}
"""Flags that parse, flags that are refused with a way out, and placeholders."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_paths_links_targets_and_flags_exist(document: Path) -> None:
    text = document.read_text()
    missing = [p for p in PATH.findall(text) if not ((ROOT / p).exists() or (ROOT / "slime" / p).exists())]
    missing += [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    missing += [f"make {t}" for t in MAKE.findall(re.sub(r"[a-z] make [a-z]", "", text)) if t not in targets]
    missing += [flag for flag in FLAG.findall(text) if flag not in KNOWN and not flag.endswith("-")]
    assert not missing, f"{document.name} names what is not there: {missing}"
