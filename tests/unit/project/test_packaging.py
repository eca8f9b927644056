"""What the project says about itself fits together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from slime.core.engine_interface import WINDOW

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENGINES = ("sglang", "sglang-router", "megatron-core", "ray", "transformers")


def requirement_lines(name: str) -> list[str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_direct_requirement_is_pinned() -> None:
    pinned = {re.split(r"==", line)[0].lower().replace("_", "-") for line in requirement_lines("constraints.txt")}
    wanted = [*PROJECT["project"]["optional-dependencies"]["cpu"], *PROJECT["project"]["dependencies"]]
    wanted += PROJECT["project"]["optional-dependencies"]["dev"]
    names = {re.split(r"[<>=\[ ]", line)[0].lower().replace("_", "-") for line in wanted}
    assert names - pinned <= {"torch"}, "torch is pinned in the Makefile"


@pytest.mark.parametrize("engine", ENGINES)
def test_one_version_of_each_engine_everywhere(engine: str) -> None:
    """Law: the requirements of a CPU name one version of each engine for each Python, and that is installed."""
    lines = [line for file in sorted((ROOT / "requirements").glob("*.txt")) for line in requirement_lines(file.name)]
    wanted = [Requirement(line) for line in lines if re.match(rf"{re.escape(engine)}==", line)]
    versions = {str(one.specifier) for one in wanted if one.marker is None or one.marker.evaluate()}
    assert versions == {f"=={metadata.version(engine)}"}


@pytest.mark.parametrize("package", WINDOW)
def test_what_is_installed_is_an_end_of_the_window(package: str) -> None:
    text = (ROOT / "pyproject.toml").read_text() + "\n".join(requirement_lines("cpu-engines-no-deps.txt"))
    named = set(re.findall(rf"(?<![\w-]){re.escape(package)}==([\w.]+)", text))
    assert named <= set(WINDOW[package]) and metadata.version(package) in WINDOW[package]


def test_nothing_machine_bound_is_committed() -> None:
    """A path of somebody's machine in a file works there and nowhere else."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not files:
        pytest.skip("not a git checkout")
    pattern = re.compile(r"(?<![\w.])/(home|Users|work|root)/\w+")
    found = []
    for name in files:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".sh", ".yaml", ".cfg", ""} and path.is_file():
            found += [f"{name}: {m.group(0)}" for m in pattern.finditer(path.read_text(errors="replace"))]
    assert not found, "\n".join(found)


def test_help_of_the_command_line_is_instant() -> None:
    code = (
        "import atexit, runpy, sys\nsys.argv = ['slime', '--help']\n"
        "heavy = {'torch', 'ray', 'sglang', 'transformers'}\n"
        "atexit.register(lambda: print('imported', sorted(heavy & set(sys.modules))))\n"
        "runpy.run_module('slime.cli.main', run_name='__main__')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert run.returncode == 0 and "doctor" in run.stdout
    assert run.stdout.endswith("imported []\n"), run.stdout


def test_ci_is_executable_and_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


def test_make_hands_the_extras_to_the_installer_whole(tmp_path: Path) -> None:
    """A comma in an argument of make's `call` would begin the next argument."""
    command = ["make", "-n", "venv", f"VENV={tmp_path / 'venv'}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    line = next(line for line in shown.splitlines() if " -e " in line)
    assert line.count("-e '.[cpu,dev]' 'torch==") == 2, line  # uv, and pip in its place


def test_the_root_has_nothing_but_what_belongs_there() -> None:
    """A report or a cache of a tool, added by mistake, would be found here."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    known = {".ci", ".dockerignore", ".gitignore", ".importlinter", ".pre-commit-config.yaml", "CHANGELOG.md"}
    known |= {"CONTRIBUTING.md", "Dockerfile", "LICENSE", "Makefile", "README.md", "benchmarks", "docs", "examples"}
    known |= {"pyproject.toml", "recipes", "requirements", "slime", "tests", "train.py", "train_async.py"}
    assert {name.split("/")[0] for name in files} <= known
