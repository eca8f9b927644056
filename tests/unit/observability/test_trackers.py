"""Trackers by name: what the real packages store, where they are installed, and a tracker of the user's own."""

from __future__ import annotations

import importlib.util
import math
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime.observability.run_folder import RunFolder
from slime.observability.sinks import Sink, StepRecord
from slime.observability.tracker import Tracker, Views
from slime.observability.trackers import TRACKERS, MlflowTracker, RunTracker, SwanlabTracker, TrackedRun

LOSSES = (0.5, 0.25, 0.125)
installed = importlib.util.find_spec


def run(folder: Path) -> TrackedRun:
    return TrackedRun(name="run-a", run_id="r-1", folder=str(folder), settings={"lr": 1e-3, "odd key@1": None})


def write(sink: Sink) -> None:
    for step, loss in enumerate(LOSSES):
        sink.write(StepRecord("train", step, {"train/loss": loss, "train/bad": math.nan}))
    sink.close()


@dataclass(frozen=True, kw_only=True)
class Kept(RunTracker):
    """Keeps what it gets."""

    rows: tuple[list[StepRecord], ...] = ()

    def open(self, run: TrackedRun) -> Sink:
        kept = self.rows[0]

        class Rows:
            essential = False

            def write(self, record: StepRecord) -> None:
                kept.append(record)

            def close(self, *, failed: bool = False) -> None:
                kept.append(StepRecord("perf", int(failed), {}))

        return Rows()


def test_a_tracker_of_the_users_own_gets_each_record_and_how_the_run_ended(tmp_path: Path) -> None:
    rows: list[StepRecord] = []
    folder = RunFolder.create(tmp_path / "run", run_id="r-1", args={})
    with (
        pytest.raises(RuntimeError),
        Tracker.with_views(Views(num_rollout=1, trackers=(Kept(rows=(rows,)),)), folder) as t,
    ):
        t.log("train", 0, {"loss": 0.5})
        raise RuntimeError
    assert [(row.kind, row.step, dict(row.metrics)) for row in rows] == [
        ("train", 0, {"train/loss": 0.5}),
        ("perf", 1, {}),
    ]


@pytest.mark.parametrize("name", [name for name in TRACKERS.names() if installed(name) is None])
def test_a_missing_package_is_named_with_the_command_that_installs_it(name: str) -> None:
    assert TRACKERS.get(name)().check(None) == f"trackers {name} needs {name}: pip install 'slime[{name}]'"


@pytest.mark.skipif(installed("sqlalchemy") is None or installed("mlflow") is None, reason="needs mlflow")
def test_mlflow_has_the_curve_and_the_end(tmp_path: Path) -> None:
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    write(MlflowTracker(mlflow_tracking_uri=uri).open(run(tmp_path)))
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("slime").experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["lr"] == "0.001"
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == list(enumerate(LOSSES))


@pytest.mark.skipif(installed("trackio") is None, reason="needs trackio")
def test_trackio_has_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    write(TRACKERS.get("trackio")().open(run(tmp_path)))
    with sqlite3.connect(tmp_path / "slime.db") as base:
        rows = base.execute("select step, json_extract(metrics, '$.\"train/loss\"') from metrics order by step")
        assert list(rows) == list(enumerate(LOSSES))


@pytest.mark.skipif(installed("swanlab") is None, reason="needs swanlab")
def test_swanlab_writes_a_run_that_can_be_synchronised(tmp_path: Path) -> None:
    write(SwanlabTracker(swanlab_mode="offline").open(run(tmp_path)))
    assert len(list(tmp_path.rglob("*.swanlab"))) == 1
