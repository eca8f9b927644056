"""The real W&B package, offline: its file holds every step, and ends as the run ended, with the guardian around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.core.processes import RUN_ID_ENV, new_run_id
from slime.observability.samples import COLUMNS
from tests.support.wandb_file import read_offline_run

DRIVER = """
import os, sys
from pathlib import Path
from slime.cluster.ray_session import guarded
from slime.core.processes import RUN_ID_ENV
from slime.observability.run_folder import RunFolder
from slime.observability.samples import ShownSample
from slime.observability.tracker import Tracker, Views

path, run_id, ending = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ[RUN_ID_ENV] = run_id
folder = RunFolder.create(path, run_id=run_id, args={})
settings = {"lr": 0.5, "wandb_key": "s"}
views = Views(num_rollout=2, use_wandb=True, wandb_mode="offline", wandb_project="p", settings=settings)
sample = ShownSample(
    kind="rollout", step=0, prompt="1 + 1 =", response="2", reward=1.0, label="2", status="completed",
    response_length=1, weight_version=3, finish_reason="stop", picked="best",
)
with guarded(run_id, log_path=path / "guardian.log", own_ray=True), Tracker.with_views(views, folder) as tracker:
    for step in range(2):
        tracker.log("rollout", step, {"rollout/raw_reward": step / 4})
        if step == 0:
            tracker.log_samples("rollout", 0, [sample])
        tracker.log("train", step, {"train/loss": 1.5, "data/trained": 8})
        tracker.add({"probe/x": 1e-6})
        tracker.log("perf", step, {"perf/step_time": 2.0})
    tracker.log("eval", 1, {"eval/sums": 0.75})
    if ending == "raise":
        raise ValueError("the run failed")
"""


def drive(folder: Path, ending: str) -> subprocess.CompletedProcess[str]:
    """A driver that logs two steps and ends in this way."""
    own = {k: v for k, v in os.environ.items() if k != RUN_ID_ENV and not k.startswith("WANDB_")}
    command = [sys.executable, "-c", DRIVER, str(folder), new_run_id(), ending]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_a_run_ends_as_finished_with_every_step_in_its_file(tmp_path: Path) -> None:
    ended = drive(tmp_path / "run", "return")
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr[-3000:]
    run = read_offline_run(tmp_path / "run")
    assert run.exit_code == 0, "the run never ended, or not as finished"
    rewards = [(row["rollout/step"], row["rollout/raw_reward"]) for row in run.history if "rollout/raw_reward" in row]
    assert rewards == [(0, 0.0), (1, 0.25)]
    assert [row["train/loss"] for row in run.history if "train/step" in row] == [1.5, 1.5]
    assert [row["eval/sums"] for row in run.history if "eval/step" in row] == [0.75]
    assert run.config["lr"] == 0.5 and run.config["wandb_key"] == "<hidden>"
    assert run.axes["train/*"] == run.axes["data/*"] == "train/step", run.axes
    assert run.axes["perf/*"] == run.axes["probe/*"] == run.axes["rollout/*"] == "rollout/step", run.axes
    (shown,) = [row for row in run.history if "samples/rollout/_type" in row]
    assert shown["rollout/step"] == 0 and shown["samples/rollout/_type"] == "table-file"
    table = json.loads((run_files(tmp_path / "run") / shown["samples/rollout/path"]).read_text())
    assert table["columns"] == list(COLUMNS)
    assert table["data"] == [[0, "best", 1.0, "2", "1 + 1 =", "2", "completed", 1, 3]]


def run_files(folder: Path) -> Path:
    """Where the one offline run below `folder` keeps its files."""
    (path,) = folder.glob("wandb/offline-run-*/files")
    return path


@pytest.mark.slow
def test_a_run_that_failed_ends_as_failed(tmp_path: Path) -> None:
    ended = drive(tmp_path / "run", "raise")
    assert ended.returncode == 1 and ended.stderr.count("Traceback") == 1, ended.stderr[-3000:]
    run = read_offline_run(tmp_path / "run")
    assert run.exit_code == 1 and len(run.history) == 8
