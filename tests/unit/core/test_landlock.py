"""A process that has confined itself reads what it named, writes where it may, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from slime.core.landlock import ALL, READ, confine, readable_libraries

mine, scratch, secret = sys.argv[1:]
if not confine({**readable_libraries(), mine: READ, scratch: ALL}):
    print("no Landlock")
    raise SystemExit
for path, mode in ((mine, "r"), (scratch + "/new", "w"), (mine, "a"), (secret, "r"), (secret, "w")):
    try:
        open(path, mode).close()
        print("yes")
    except PermissionError:
        print("no")
"""


def test_what_is_not_named_is_out_of_reach(tmp_path: Path) -> None:
    """Law: a path has the rights that it was given, and what was not named has none."""
    for name in ("mine", "secret"):
        (tmp_path / name).write_text("x")
    (tmp_path / "scratch").mkdir()
    paths = [str(tmp_path / name) for name in ("mine", "scratch", "secret")]
    said = subprocess.run([sys.executable, "-c", PROGRAM, *paths], capture_output=True, text=True, check=True).stdout
    if said.strip() == "no Landlock":
        pytest.skip("the kernel has no Landlock")
    assert said.split() == ["yes", "yes", "no", "no", "no"]
    assert (tmp_path / "secret").read_text() == "x"
