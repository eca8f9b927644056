"""Experiment trackers besides W&B and TensorBoard: `--trackers mlflow trackio swanlab`.

A tracker is a registered class whose `open` returns a sink. To add one, derive from `RunTracker` and register it. Your
own tracker is selected by its import path, `--trackers my_pkg.mine`. The packages are optional and imported in `open`.

Each metric is logged under its name in `metrics.jsonl`, at the step of its kind. Trackers without an axis for each kind
of step get the number as the metric `<kind>/step` too.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slime.core.errors import ConfigError
from slime.core.registry import Registry
from slime.observability.sinks import Sink, StepRecord

Args = Any
"""`slime.settings.Args`, which this room does not import."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What a tracker learns about the run."""

    name: str
    run_id: str
    folder: str
    """A folder in the run folder for the tracker's files."""
    settings: Mapping[str, Any] = field(repr=False)
    """All settings of the run, except secrets."""


class RunTracker(ABC):
    name: ClassVar[str]
    package: ClassVar[str | None] = None
    """The optional package that the tracker needs, which is also the name of the extra that installs it."""

    @abstractmethod
    def open(self, run: TrackedRun) -> Sink:
        """Starts a run in the tracker. Raises `ConfigError` if its server refuses."""

    def check(self, args: Args) -> str | None:
        """Returns what is missing and how to install it, or None."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return f"trackers {self.name} needs {self.package}: pip install 'slime[{self.package}]'"


TRACKERS: Registry[RunTracker] = Registry(
    "a tracker", flag="--trackers", package="slime.observability.trackers", contract=RunTracker
)
PROJECT = "slime"


class _Logged:
    """A sink that calls `log(metrics, step)` and `finish(failed)`."""

    essential = False

    def __init__(self, log: Any, finish: Any) -> None:
        self._log, self._finish = log, finish

    def write(self, record: StepRecord) -> None:
        self._log({**record.metrics, record.axis: float(record.step)}, record.step)

    def close(self, *, failed: bool = False) -> None:
        self._finish(failed)


_NOT_IN_MLFLOW = re.compile(r"[^\w./ :-]")


@TRACKERS.register("mlflow")
@dataclass(frozen=True, kw_only=True)
class MlflowTracker(RunTracker):
    """MLflow (https://mlflow.org). The server is MLFLOW_TRACKING_URI, else a database in the run folder."""

    package: ClassVar[str | None] = "mlflow"
    mlflow_tracking_uri: str | None = None
    """URI of the MLflow server or database. Default: MLFLOW_TRACKING_URI, else trackers/mlflow.db in the run folder."""
    mlflow_experiment: str = PROJECT
    """MLflow experiment of the run."""

    def open(self, run: TrackedRun) -> Sink:
        import mlflow  # type: ignore[import-not-found,unused-ignore]
        from mlflow.entities import Metric, Param  # type: ignore[import-not-found,unused-ignore]

        uri = self.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder}/mlflow.db"
        try:
            client = mlflow.MlflowClient(tracking_uri=uri)
            found = client.get_experiment_by_name(self.mlflow_experiment)
            experiment = found.experiment_id if found is not None else client.create_experiment(self.mlflow_experiment)
            id = client.create_run(experiment, run_name=run.name, tags={"slime.run_id": run.run_id}).info.run_id
        except Exception as error:
            raise ConfigError(f"--trackers mlflow cannot use {uri}: {error}; set --mlflow-tracking-uri") from error
        params = [Param(_NOT_IN_MLFLOW.sub("_", key), str(value)[:500]) for key, value in run.settings.items()]
        for begin in range(0, len(params), 100):
            client.log_batch(id, params=params[begin : begin + 100])

        def log(metrics: Mapping[str, float], step: int) -> None:
            now_ms = int(time.time() * 1000)
            items = [Metric(_NOT_IN_MLFLOW.sub("_", key), value, now_ms, step) for key, value in metrics.items()]
            for begin in range(0, len(items), 1000):
                client.log_batch(id, metrics=items[begin : begin + 1000])

        def finish(failed: bool) -> None:
            client.set_terminated(id, "FAILED" if failed else "FINISHED")

        return _Logged(log, finish)


@TRACKERS.register("trackio")
@dataclass(frozen=True, kw_only=True)
class TrackioTracker(RunTracker):
    """Trackio of Hugging Face. Its files are in TRACKIO_DIR; `trackio show` displays them."""

    package: ClassVar[str | None] = "trackio"
    trackio_project: str = PROJECT
    """Trackio project of the run."""
    trackio_space_id: str | None = None
    """Hugging Face Space that shows the run. Default: this machine only."""

    def open(self, run: TrackedRun) -> Sink:
        import trackio  # type: ignore[import-not-found,unused-ignore]

        opened = trackio.init(
            project=self.trackio_project,
            name=run.name,
            space_id=self.trackio_space_id,
            config=_plain(run.settings),
            resume="allow",
            embed=False,
        )
        return _Logged(lambda metrics, step: opened.log(dict(metrics), step=step), lambda failed: opened.finish())


@TRACKERS.register("swanlab")
@dataclass(frozen=True, kw_only=True)
class SwanlabTracker(RunTracker):
    """SwanLab (https://swanlab.cn)."""

    package: ClassVar[str | None] = "swanlab"
    swanlab_project: str = PROJECT
    """SwanLab project of the run."""
    swanlab_mode: str | None = None
    """SwanLab mode: online, local, offline or disabled. Default: SwanLab's own (SWANLAB_MODE)."""

    def open(self, run: TrackedRun) -> Sink:
        import swanlab  # type: ignore[import-not-found,unused-ignore]

        try:
            opened = swanlab.init(
                project=self.swanlab_project,
                name=run.name,
                mode=self.swanlab_mode,
                log_dir=run.folder,
                config=_plain(run.settings),
            )
        except Exception as error:
            raise ConfigError(
                f"--trackers swanlab was refused: {error}; run swanlab login, or set --swanlab-mode offline"
            ) from error

        def log(metrics: Mapping[str, float], step: int) -> None:
            opened.log({key: value for key, value in metrics.items() if math.isfinite(value)}, step=step)

        return _Logged(log, lambda failed: opened.finish("crashed" if failed else "success"))


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: v if isinstance(v, bool | int | float | str) else str(v) for key, v in settings.items()}
