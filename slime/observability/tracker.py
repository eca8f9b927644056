"""`Tracker`: passes the metrics of each step to all sinks.

Only used from the driver's thread. Ranks and actors return their metrics to the driver.

Invariants
1. Step numbers of each kind increase. A repeated or earlier step is an error, but an evaluation may repeat its step.
2. If a view (TensorBoard, W&B, the console) fails, it is dropped with a log message and the run continues. If the JSONL
   file cannot be written, the run fails. Problems with samples never make a run fail.

Each metric from a rank, micro-batch or sample defines how it is combined with others (`Reduce`): means are weighted,
counts are summed, and worst cases use the maximum. So the reduction is the same everywhere, and never a mean of means.
It is associative: any grouping of the inputs yields the same metric, up to float rounding. Except for LAST, it is also
commutative. All metrics with the same name have the same kind. Mixing kinds is an error.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from slime.core.errors import DataError
from slime.core.processes import LOOPBACK
from slime.observability.health import Alerts, HealthSink, count_nothing, learns_from_rewards
from slime.observability.progress import Progress
from slime.observability.prometheus import PrometheusSink
from slime.observability.run_folder import RunFolder, plain
from slime.observability.samples import Kind, SamplesFile, ShownSample
from slime.observability.sinks import (
    KINDS,
    ConsoleSink,
    JsonlSink,
    SampleView,
    Sink,
    StepRecord,
    TensorBoardSink,
    WandbSink,
)
from slime.observability.trackers import RunTracker, TrackedRun

logger = logging.getLogger(__name__)


class Reduce(str, Enum):
    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Metric:
    value: float
    how: Reduce = Reduce.MEAN
    weight: float = 1.0
    """Number of units (tokens, samples) that a mean covers. Ignored by the other kinds."""

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise DataError(f"the weight of a mean must be >= 0, got {self.weight}")

    def merge(self, other: Metric) -> Metric:
        """Combines this metric with a later one. Raises `DataError` if they reduce differently."""
        if self.how is not other.how:
            raise DataError(f"cannot combine a {self.how.value} with a {other.how.value}; use one kind for each name")
        if self.how is Reduce.MEAN:
            return self._merge_mean(other)
        if self.how is Reduce.LAST:
            return other
        if self.how is Reduce.SUM:
            return dataclasses.replace(self, value=self.value + other.value)
        if math.isnan(self.value) or math.isnan(other.value):
            return dataclasses.replace(self, value=math.nan)  # max() and min() can hide NaN
        pick = max if self.how is Reduce.MAX else min
        return dataclasses.replace(self, value=pick(self.value, other.value))

    def _merge_mean(self, other: Metric) -> Metric:
        weight = self.weight + other.weight
        # An empty mean may be NaN (0/0), which must not propagate.
        parts = [m.value * m.weight for m in (self, other) if m.weight > 0]
        value = sum(parts) / weight if weight > 0 else math.nan
        return Metric(value, Reduce.MEAN, weight)


MetricValue = Metric | float | int


def mean(value: float, weight: float = 1.0) -> Metric:
    """Returns a mean over `weight` units."""
    return Metric(float(value), Reduce.MEAN, float(weight))


def total(value: float) -> Metric:
    """Returns a count or amount that is summed."""
    return Metric(float(value), Reduce.SUM)


def maximum(value: float) -> Metric:
    return Metric(float(value), Reduce.MAX)


def minimum(value: float) -> Metric:
    return Metric(float(value), Reduce.MIN)


def last(value: float) -> Metric:
    """Returns a state, such as a learning rate or a version: the latest value is kept."""
    return Metric(float(value), Reduce.LAST)


def as_metric(value: MetricValue) -> Metric:
    """Converts a plain number to a mean with weight 1."""
    return value if isinstance(value, Metric) else mean(value)


def merge(*parts: Mapping[str, MetricValue]) -> dict[str, Metric]:
    """Combines the metrics of several ranks, micro-batches or samples by name. Raises `DataError` if a name has metrics
    of different kinds."""
    out: dict[str, Metric] = {}
    for part in parts:
        for name, value in part.items():
            metric = as_metric(value)
            try:
                out[name] = out[name].merge(metric) if name in out else metric
            except DataError as error:
                raise DataError(f"metric {name}: {error}") from None
    return out


def to_floats(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    """Returns plain numbers for a sink. Omits means with weight zero."""
    out = {}
    for name, value in metrics.items():
        metric = as_metric(value)
        if metric.how is not Reduce.MEAN or metric.weight > 0:
            out[name] = metric.value
    return out


def prefixed(prefix: str, metrics: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def describe(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns `name/mean`, `/median`, `/max` and `/min` of `values`. Empty if there are none."""
    if not values:
        return {}
    return {
        f"{name}/mean": math.fsum(values) / len(values),
        f"{name}/median": statistics.median(values),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Views:
    num_rollout: int | None
    """Number of steps, for the console."""
    eval_interval: int | None = None
    """Number of steps between evaluations, for the console's estimate of the time left."""
    log_samples_interval: int | None = None
    """Number of steps between samples on the console (`samples.is_due`)."""
    alert_webhook: str | None = field(default=None, repr=False)
    alert_command: str | None = None
    metrics_port: int | None = None
    metrics_host: str = LOOPBACK
    trackers: tuple[RunTracker, ...] = ()
    use_tensorboard: bool = False
    tensorboard_dir: str | None = None
    tb_project_name: str | None = None
    tb_experiment_name: str | None = None
    use_wandb: bool = False
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    wandb_dir: str | None = None
    wandb_key: str | None = field(default=None, repr=False)
    wandb_host: str | None = None
    wandb_team: str | None = None
    wandb_group: str | None = None
    wandb_project: str | None = None
    wandb_random_suffix: bool = True
    wandb_run_id: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """All settings of the run, except secrets, for W&B."""


class Tracker:
    """Logs the steps of one run. Leaving the block closes the sinks."""

    def __init__(self, folder: RunFolder, sinks: Sequence[Sink] = (), alerts: Alerts | None = None) -> None:
        """`sinks`: views besides `folder`/metrics.jsonl, which is always written. `alerts`: closed with them."""
        self.alerts = alerts
        self.folder = folder
        self._sinks: list[Sink] = [JsonlSink(folder.metrics), *sinks]
        self.prometheus = next((sink for sink in sinks if isinstance(sink, PrometheusSink)), None)
        self._samples: SamplesFile | None = SamplesFile(folder.samples)
        self._last_step: dict[str, int] = {}
        self._pending: dict[str, MetricValue] = {}

    @classmethod
    def with_views(cls, views: Views, folder: RunFolder) -> Tracker:
        """Creates the sinks selected by `views`. Raises `ConfigError` if a package is missing."""
        sinks: list[Sink] = [
            ConsoleSink(
                num_rollout=views.num_rollout,
                samples_interval=views.log_samples_interval,
                eval_interval=views.eval_interval,
            )
        ]
        prometheus = None
        if views.metrics_port is not None:
            host, port = views.metrics_host, views.metrics_port
            prometheus = PrometheusSink(folder.path, run_id=folder.run_id, host=host, port=port)
            sinks.append(prometheus)
        alerts = Alerts(
            webhook=views.alert_webhook,
            command=views.alert_command,
            run_id=folder.run_id,
            run_dir=str(folder.path),
            count=count_nothing if prometheus is None else prometheus.count_alert,
        )
        learns = learns_from_rewards(views.settings)
        sinks.append(HealthSink(folder.metrics, learns_from_rewards=learns, alerts=alerts))
        if views.use_tensorboard:
            sinks.append(TensorBoardSink(_tensorboard_dir(views, folder)))
        if views.use_wandb:
            sinks.append(_wandb(views, folder))
        if views.trackers:
            kept = folder.path / "trackers"
            kept.mkdir(mode=0o700, exist_ok=True)
            told = TrackedRun(
                name=folder.path.name, run_id=folder.run_id, folder=str(kept.absolute()), settings=plain(views.settings)
            )
            sinks += [tracker.open(told) for tracker in views.trackers]
        return cls(folder, sinks, alerts)

    def add(self, metrics: Mapping[str, MetricValue]) -> None:
        """Stores metrics for the "perf" record of the current step. A name without a prefix becomes `perf/name`."""
        self._pending.update(_grouped("perf", metrics))

    def log(self, kind: str, step: int, metrics: Mapping[str, MetricValue]) -> dict[str, float]:
        """Logs one step and returns its metrics as plain numbers. A name without a prefix becomes `kind/name`.

        `kind`: "rollout", "train", "eval" or "perf". Raises `DataError` for an unknown kind or a step that does not
        increase.
        """
        if kind not in KINDS:
            raise DataError(f"unknown kind of step {kind!r}; use one of {KINDS}")
        if kind in self._last_step and kind != "eval" and step <= self._last_step[kind]:
            raise DataError(
                f"{kind} step {step} was logged after step {self._last_step[kind]}; log steps once, in increasing order"
            )
        self._last_step[kind] = step
        grouped = _grouped(kind, metrics)
        if kind == "perf":
            grouped = {**self._pending, **grouped}
            self._pending = {}
        record = StepRecord(kind, step, to_floats(grouped))
        for sink in list(self._sinks):
            self._write(sink, partial(sink.write, record))
        return dict(record.metrics)

    def log_samples(self, kind: Kind, step: int, samples: Sequence[ShownSample]) -> None:
        """Appends the samples of a step or evaluation to `samples.jsonl` and passes them to the views."""
        if not samples:
            return
        try:
            if self._samples is not None:
                self._samples.append(samples)
        except Exception:
            logger.exception("cannot write %s; no more samples will be saved", self.folder.samples.name)
            self._samples = None
        for sink in list(self._sinks):
            if isinstance(sink, SampleView):
                self._write(sink, partial(sink.write_samples, kind, step, samples))

    @contextmanager
    def progress(self, what: str, *, limit_s: float | None = None) -> Iterator[Callable[[str], str]]:
        """Shows the progress of a long operation. Yields a function that shows a note
        and returns it (or "none" if it is empty)."""
        with Progress(what, limit_s=limit_s) as progress:

            def on_poll(text: str) -> str:
                progress.note(text)
                return text or "none"

            yield on_poll

    def _write(self, sink: Sink, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception:
            if sink.essential:
                raise
            logger.exception("%s failed and is disabled; metrics.jsonl is still written", type(sink).__name__)
            self._sinks.remove(sink)

    def close(self, *, failed: bool = False) -> None:
        """Closes all sinks. `failed`: whether the run failed. Idempotent."""
        for sink in self._sinks:
            try:
                sink.close(failed=failed)
            except Exception:
                logger.exception("closing %s failed", type(sink).__name__)
        self._sinks = []
        if self.alerts is not None:
            self.alerts.close()
            self.alerts = None

    def hang(self, key: str, text: str | None) -> None:
        """Reports a hang, or with None its end. `key`: what stands still."""
        if text is not None and self.prometheus is not None:
            self.prometheus.exposed.count("slime_hangs_total", "hangs that were reported")
        if text is not None:
            self.alert("hang", text, key=key)
        elif self.alerts is not None:
            self.alerts.resolve("hang", key=key)

    def alert(self, kind: str, text: str, *, key: str = "") -> None:
        """Sends an alert (`Alerts.fire`). Does nothing without --alert-webhook and --alert-command."""
        if self.alerts is not None:
            self.alerts.fire(kind, text, key=key)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)


def _grouped(kind: str, metrics: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
    return {name if "/" in name else f"{kind}/{name}": value for name, value in metrics.items()}


def _tensorboard_dir(views: Views, folder: RunFolder) -> Path:
    """Returns the run's own folder inside --tensorboard-dir or TENSORBOARD_DIR, which several runs can share."""
    shared = views.tensorboard_dir or os.environ.get("TENSORBOARD_DIR")
    if not shared and not views.tb_project_name:
        return folder.tensorboard
    base = Path(shared) if shared else folder.tensorboard
    return base / (views.tb_project_name or "slime") / (views.tb_experiment_name or folder.run_id)


def _wandb(views: Views, folder: RunFolder) -> WandbSink:
    if views.wandb_key:
        os.environ["WANDB_API_KEY"] = views.wandb_key
    if views.wandb_host:
        os.environ["WANDB_BASE_URL"] = views.wandb_host
    name = views.wandb_group
    if name and views.wandb_random_suffix:
        name = f"{name}-{folder.run_id.rpartition('-')[2]}"
    return WandbSink(
        settings=plain(views.settings),
        project=views.wandb_project,
        entity=views.wandb_team,
        group=views.wandb_group,
        name=name,
        id=views.wandb_run_id,
        resume="allow" if views.wandb_run_id else None,
        mode=views.wandb_mode,
        dir=views.wandb_dir or str(folder.path),
    )
