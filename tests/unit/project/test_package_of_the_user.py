"""Law: a user's package `examples` can be imported where ours lies first on the import path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRINT = """
from importlib import import_module, util
from examples.multi_agent.rollout import generate
found = util.find_spec("examples.second_try")
print(import_module("examples.retool.tools").generate, generate, found.origin)
"""


@pytest.mark.parametrize("regular", [True, False], ids=["package", "folder"])
def test_our_examples_do_not_hide_those_of_the_user(tmp_path: Path, regular: bool) -> None:
    """Its modules come first (`multi_agent` is one of ours as well), and ours are found beside them."""
    for name, module in (("multi_agent", "rollout"), ("retool", "tools")):
        folder = tmp_path / "examples" / name
        folder.mkdir(parents=True)
        (folder / f"{module}.py").write_text(f"generate = 'of the user: {name}'\n")
        for parent in (folder, folder.parent) if regular else ():
            (parent / "__init__.py").write_text("")
    run = subprocess.run(
        [sys.executable, "-c", PRINT],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    said = f"of the user: retool of the user: multi_agent {ROOT / 'examples' / 'second_try.py'}"
    assert run.stdout.strip() == said
