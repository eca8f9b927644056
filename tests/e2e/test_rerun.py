"""`slime rerun` of a run gives the same settings and, fed with the same rollouts, the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.e2e import NUM_STEPS, ROOT, Recorded, environment, rank_files, started_and_finished

pytestmark = pytest.mark.slow
OF_A_START = ("run_id", "run_dir", "save", "save_hf", "components", "origins")
"""Settings that name the start, or lie in its folder."""
DIFFERS = ("  setting ", "  file ", "  version of ", "  environment ", "  host ")
"""Lines of what is another one now; not of code: someone may edit the checkout while this runs."""


@pytest.fixture(scope="module")
def first(runs: Path, recorded: Recorded) -> Path:
    """A run fed with recorded rollouts, whose checkpoints and export lie in its folder."""
    run_dir = runs / "first"
    feed = ["--load-debug-rollout-data", recorded.rollouts]
    saves = ["--save", run_dir / "save", "--save-interval", "1", "--save-hf", run_dir / "export"]
    started_and_finished(run_dir, [*recorded.flags, *feed, *saves])
    return run_dir


@pytest.fixture(scope="module")
def rerun(first: Path) -> subprocess.CompletedProcess[str]:
    """It again, by the command alone."""
    return repeated(first)


def repeated(first: Path, *given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slime", "rerun", str(first), *given]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)


def settings(run_dir: Path) -> dict[str, Any]:
    found = json.loads((run_dir / "args.json").read_text())
    return {name: value for name, value in found.items() if name not in OF_A_START}


def test_the_settings_are_the_same(first: Path, rerun: subprocess.CompletedProcess[str]) -> None:
    assert rerun.returncode == 0, rerun.stdout + rerun.stderr
    told = [line for line in rerun.stdout.splitlines() if line.startswith(DIFFERS)]
    assert not told
    assert settings(first.with_name("first-rerun")) == settings(first)


def test_the_weights_are_the_same(first: Path, rerun: subprocess.CompletedProcess[str]) -> None:
    """Law: checkpoint and export of a rerun on recorded rollouts are bitwise those of the run."""
    assert rerun.returncode == 0, rerun.stdout + rerun.stderr
    again = first.with_name("first-rerun")
    one, two = (rank_files(run / "save", NUM_STEPS - 1) for run in (first, again))
    assert one.keys() == two.keys()
    different = [name for name in one if one[name] != two[name]]  # megabytes: no diff of these, please
    assert not different, different
    assert (first / "export" / "model.safetensors").read_bytes() == (
        again / "export" / "model.safetensors"
    ).read_bytes()


def test_one_step_is_repeated_alone(first: Path) -> None:
    """Law: from the checkpoint before it, a recorded step gives bitwise the weights that it gave in the run."""
    step, again = 5, first.with_name("first-one")
    before = ["--load", str(first / "save"), "--ckpt-step", str(step - 1), "--num-rollout", str(step + 1)]
    done = repeated(first, *before, "--lr-decay-iters", str(NUM_STEPS), "--run-dir", str(again))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in sorted((again / "save").glob("step_*"))] == [f"step_{step:06d}"]
    assert rank_files(again / "save", step) == rank_files(first / "save", step)
