"""A change is one edit: five of them, made in a copy of the repository and run.

Each folder of `changes/` holds the files of one change in their places, for an edit the file `edit.txt` (a file, then
for each place the line of it that new lines stand below, and these; `---` between places), and `proof.py`, which runs
in the copy. Where that builds models, `quick.py` shows what can be seen without.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.marks import quick

ROOT = Path(__file__).parents[2]
CHANGES = Path(__file__).with_name("changes")
BUILD_MODELS = {"estimator", "family"}
"""Each has a `quick.py`, too."""
QUICK = ("estimator", "quick.py")
"""The others are slow."""
PROOFS = [(path.parent.name, path.name) for path in sorted([*CHANGES.glob("*/proof.py"), *CHANGES.glob("*/quick.py")])]


def new_files(change: Path) -> list[Path]:
    """In their places below the change's folder."""
    return sorted(p.relative_to(change) for p in change.rglob("*.py") if p.parent != change)


def make(change: Path, house: Path) -> None:
    """Makes the change in a copy."""
    for file in new_files(change):
        assert not (house / file).exists(), f"{file} is not new"
        (house / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(change / file, house / file)
    edit = change / "edit.txt"
    if edit.exists():
        name, _, places = edit.read_text().partition("\n")
        text = (house / name).read_text().splitlines()
        for place in places.split("---\n"):
            below, *lines = place.splitlines()
            before = above(text, below)
            text = [*before, *lines, *text[len(before) :]]
        (house / name).write_text("\n".join(text) + "\n")


def above(text: list[str], line: str) -> list[str]:
    """Up to a line that occurs once, and the help text below it."""
    assert text.count(line) == 1, f"{line!r} occurs {text.count(line)} times"
    end = text.index(line) + 1
    while end < len(text) and text[end].strip().startswith('"""'):
        end += 1
    return text[:end]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of what git tracks, as it stands."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not listed:
        pytest.skip("not a git checkout")
    for name in listed.rstrip("\0").split("\0"):
        if not name.endswith((".py", ".json", ".toml")) or not (ROOT / name).is_file():
            continue
        (tmp_path / "house" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / "house" / name)
    return tmp_path / "house"


@pytest.mark.parametrize(("name", "proof"), quick(PROOFS, QUICK))
def test_a_change_is_one_file_or_one_edit(name: str, proof: str, house: Path, tmp_path: Path) -> None:
    change = CHANGES / name
    files, edited = new_files(change), (change / "edit.txt").exists()
    assert len({file.parent if name == "family" else file for file in files}) + edited == 1, "one file, new or edited"
    make(change, house)
    work = tmp_path / "work"
    work.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(house), "PYTHONSAFEPATH": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(change / proof), str(work)],
        cwd=house,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-4000:]}"


def test_the_five_changes_of_the_promise_are_there() -> None:
    there = {path.name for path in CHANGES.iterdir() if (path / "proof.py").exists()}
    assert there == {"estimator", "family", "schedule", "transport", "flag"}
    assert {path.name for path in CHANGES.iterdir() if (path / "quick.py").exists()} == BUILD_MODELS
