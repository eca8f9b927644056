"""docs/index.md leads to every page, and the pages build into a site without a warning (`make docs`)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"index.md"}
LOOKED_FOR, *LISTS = re.split(r"^## (?=The path$|Guides$|Reference$)", (DOCS / "index.md").read_text(), flags=re.M)
"""The first part goes from what people look for to sections; each list is a part of the navigation."""


def test_each_page_is_in_the_navigation_once() -> None:
    in_path = "## The path\n" in (DOCS / "index.md").read_text()  # without that list, its pages stand in their order
    pages = {page for page in PAGES if in_path or not page.startswith("path/")}
    listed = Counter(re.findall(r"^(?:-|\d\.) \[[^\]]+\]\(([^)]+)\)", "\n".join(LISTS), re.M))
    assert listed == Counter(pages), "each page belongs into one list of docs/index.md: The path, Guides or Reference"


def test_the_index_leads_to_each_page() -> None:
    guides = {page for page in PAGES if not page.startswith("path/")}
    missing = guides - set(re.findall(r"\]\(([\w/]+\.md)", LOOKED_FOR))
    assert not missing, f"docs/index.md has no entry for what people look for in {sorted(missing)}"


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_page_starts_with_a_sentence(page: str) -> None:
    """Law: what a page is for stands below its title, before any section, table or block of code."""
    _, _, rest = (DOCS / page).read_text().partition("\n\n")
    first = rest.split("\n\n")[0]
    assert re.match(r"[\w`\[*]", first) and re.search(r"\.(\s|$)", first), f"docs/{page} does not say what it is for"


def builder() -> str:
    """A Python that has Sphinx: this one, or the one of `make docs`."""
    of_make = ROOT / "build" / "site-venv" / "bin" / "python"
    if find_spec("sphinx") is None and not of_make.exists():
        pytest.skip("no Sphinx here; `make docs` installs it")
    return sys.executable if find_spec("sphinx") is not None else str(of_make)


def build(docs: Path, out: Path) -> subprocess.CompletedProcess[str]:
    options = ("-q", "-E", "-W", "--keep-going", "-c", docs / "site")
    command = [builder(), "-m", "sphinx", *map(str, options), str(docs), str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = build(DOCS, tmp_path / "site")
    assert built.returncode == 0, built.stderr
    sites = {page.removesuffix(".md") + ".html" for page in PAGES}
    assert all((tmp_path / "site" / page).exists() for page in sites)
    loads = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*"')
    pages = (tmp_path / "site").rglob("*.html")
    assert not [found for page in pages for found in loads.findall(page.read_text())]


@pytest.mark.slow
def test_a_link_to_nowhere_fails_the_build(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    for name in ("examples", "README.md", "train.py", "train_async.py", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    page = tmp_path / "docs" / "data.md"
    links = ("[a](graders.md#no-such-section)", "[b](no_such_page.md)", "[c](../examples/no_such_file.py)")
    page.write_text(page.read_text() + "\n" + ", ".join(links) + "\n")
    built = build(tmp_path / "docs", tmp_path / "site")
    assert built.returncode != 0
    assert [name in built.stderr for name in ("no-such-section", "no_such_page", "no_such_file")] == [True] * 3
