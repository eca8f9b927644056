"""`RunRecord`: the content of a run folder. Only `metrics.jsonl` is required.

Invariants
1. If a resumed run repeated a step, only the last repetition counts. Steps discarded by the resume do not count
   (`standing_rows`).
2. Steps are numbered from 0, as in `metrics.jsonl`. An evaluation has the number of the step before it, or -1 before
   step 0.
"""

from __future__ import annotations

import calendar
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from slime.core.errors import DataError
from slime.observability.samples import FILE_NAME, ShownSample, read_samples
from slime.observability.sinks import AXES, read_jsonl

Row = Mapping[str, float]
"""One line of `metrics.jsonl`: `time` (Unix seconds), the step on its axis, and metrics by name."""


class RunKind(str, Enum):
    """The kind of a run, as displayed in the report."""

    SYNC = "synchronous RL"
    ASYNC = "asynchronous RL"
    SFT = "supervised fine-tuning"
    GENERATION = "generation only"
    EVALUATION = "evaluation only"


@dataclass(frozen=True, slots=True)
class Start:
    """One launch of the run."""

    time_s: float | None
    """Unix time. None if the record is unreadable."""
    step: int | None
    """First step logged by this launch, or None."""
    facts: Mapping[str, Any]
    """The launch's entry in `run.json`: time, command, versions, commit, host."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    path: Path
    rows: Sequence[Row]
    """The rows that count, in file order."""
    settings: Mapping[str, Any]
    """`args.json` of the latest launch."""
    starts: Sequence[Start]
    samples: Sequence[ShownSample]
    traces: Sequence[Path]
    """The driver's Chrome traces, one per launch."""
    kind: RunKind

    @property
    def title(self) -> str:
        return report_title(self.settings)

    @property
    def resumed_at(self) -> list[int]:
        """First step of each launch that continued another one; a launch that logged no step is not counted."""
        logged = [start.step for start in self.starts if start.step is not None]
        return [step for step in logged[1:] if step > 0]


def read_run(path: Path) -> RunRecord:
    """Reads a run folder. Raises `DataError` if no step was logged."""
    metrics = path / "metrics.jsonl"
    rows = read_jsonl(metrics) if metrics.is_file() else []
    if not rows:
        raise DataError(f"{metrics} has no steps, so there is nothing to report; pass a run folder")
    settings = _json_dict(path / "args.json")
    starts = _starts(_facts_of_starts(_json_dict(path / "run.json")), rows)
    return RunRecord(
        path=path,
        rows=standing_rows(rows, starts),
        settings=settings,
        starts=starts,
        samples=read_samples(path / FILE_NAME),
        traces=sorted((path / "traces").glob("*.json")),
        kind=kind_of(rows, settings, starts),
    )


def _json_dict(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _facts_of_starts(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the readable launches in a `run.json` that may be corrupt."""
    found = record.get("starts")
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def report_title(settings: Mapping[str, Any]) -> str:
    """Returns a short title with model, data and method. `settings`: from `args.json`."""
    model = Path(str(settings.get("hf_checkpoint") or "")).name
    method = "SFT" if settings.get("loss_type") == "sft_loss" else _method(settings.get("advantage_estimator"))
    parts = [model, _data_name(settings.get("prompt_data")), method]
    return ", ".join(p for p in parts if p) or "slime run"


def _method(estimator: object) -> str:
    """Returns a short name: "GRPO" for `grpo`, "mad" for `my/mad.py`, `my.mad` and `my.py:mad`."""
    given = str(estimator or "")
    name = re.split(r"[/:.]", given.removesuffix(".py"))[-1]
    return name.upper() if name == given else name


DULL_STEMS = re.compile(r"(train|training|data|prompts|rollout)(-\d+-of-\d+)?", re.I)
"""File names that say nothing about the data without their folder."""


def _data_name(prompt_data: object) -> str:
    """Returns a short name: "demo" for `assets/demo/train.jsonl@[0:100]`, "part" for `gsm8k/part.parquet`, "sums" for
    `rg:sums?size=5`.
    """
    given = prompt_data[0] if isinstance(prompt_data, list) and prompt_data else prompt_data
    text = str(given or "").partition("@")[0].partition("?")[0]
    if re.match(r"\w+:(?!/)", text):
        return text.partition(":")[2]
    path = Path(text)
    return path.parent.name if DULL_STEMS.fullmatch(path.stem) and path.parent.name else path.stem


def kind_of(rows: Sequence[Row], settings: Mapping[str, Any], starts: Sequence[Start]) -> RunKind:
    """Determines the kind of run from its settings and logged metrics."""
    if settings.get("loss_type") == "sft_loss":
        return RunKind.SFT
    if not any("train/step" in row for row in rows):
        generated = any("rollout/step" in row for row in rows)
        return RunKind.GENERATION if generated else RunKind.EVALUATION
    found = starts[-1].facts.get("command") if starts else ()
    command = found[:2] if isinstance(found, (list, tuple)) else ()
    is_async = any(Path(str(word)).name in ("train-async", "train_async.py") for word in command)
    return RunKind.ASYNC if is_async or settings.get("fully_async") else RunKind.SYNC


def step_of(row: Row) -> int | None:
    """Returns a row's step, whichever axis it is on."""
    return next((int(row[axis]) for axis in AXES.values() if axis in row), None)


def standing_rows(rows: Sequence[Row], starts: Sequence[Start]) -> list[Row]:
    """Returns the rows that count: drops those that a later launch replaced from its first step on."""
    standing: list[Row] = list(rows)
    for start in starts[1:]:
        if start.time_s is not None and start.step is not None:
            standing = [r for r in standing if r.get("time", 0) >= start.time_s or (step_of(r) or 0) < start.step]
    return standing


def _starts(facts: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> list[Start]:
    times = [_unix_time(one.get("time")) for one in facts]
    ends = [*times, None][1:]
    return [
        Start(begin, _first_step(rows, begin, end), one) for one, begin, end in zip(facts, times, ends, strict=True)
    ]


def _first_step(rows: Sequence[Row], begin_s: float | None, end_s: float | None) -> int | None:
    """Returns the first step logged in a time interval, excluding evaluations."""
    for row in rows if begin_s is not None else ():
        time_s = row.get("time", 0.0)
        if begin_s is not None and time_s >= begin_s and (end_s is None or time_s < end_s) and "eval/step" not in row:
            return step_of(row)
    return None


def _unix_time(text: object) -> float | None:
    """Parses `2026-01-31T12:00:00+0100`."""
    match = re.fullmatch(r"(.{19})([+-])(\d\d):?(\d\d)", str(text))
    if match is None:
        return None
    try:
        local_s = calendar.timegm(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
    offset_s = int(match[3]) * 3600 + int(match[4]) * 60
    return float(local_s - offset_s if match[2] == "+" else local_s + offset_s)


def given_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yields (name, value, origin) of all settings, those given by the user first, then by name."""
    origins = settings.get("origins")
    origins = origins if isinstance(origins, Mapping) else {}
    owners = [name for name, value in settings.items() if isinstance(value, dict) and name not in ("idle", "origins")]
    flat: dict[str, Any] = {k: v for k, v in settings.items() if k not in (*owners, "idle", "origins", "format")}
    for owner in owners:
        prefix = "" if owner == "components" else f"{owner}."
        flat |= {f"{prefix}{name}": value for name, value in settings[owner].items()}
    known = [(name, value, str(origins.get(name, ""))) for name, value in flat.items()]
    yield from sorted(known, key=lambda one: (not was_given(one[2]), one[0]))


def was_given(origin: str) -> bool:
    """Returns whether a setting with this origin was given by the user."""
    return bool(origin) and not origin.startswith(("default", "derived", "HF config"))


# --- curves

MAX_POINTS = 400
"""Maximum number of points drawn per curve, to keep the page small."""
SMOOTHED_FROM = 100
"""Curves with at least this many steps are drawn with a running mean."""
WINDOW_PART = 40
"""The running mean covers 1/40 of the steps on either side."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Finite values, ordered by step."""

    steps: Sequence[float]
    values: Sequence[float]

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def first(self) -> float:
        return self.values[0]

    @property
    def last(self) -> float:
        return self.values[-1]


def curve(rows: Sequence[Row], key: str) -> Curve:
    """Returns a metric's finite values by step. If a step was logged twice, the last value counts."""
    points: dict[int, float] = {}
    for row in rows:
        if key in row and math.isfinite(row[key]) and (step := step_of(row)) is not None:
            points[step] = row[key]
    ordered = sorted(points.items())
    return Curve([float(step) for step, _ in ordered], [value for _, value in ordered])


def steps_not_finite(rows: Sequence[Row], key: str) -> list[int]:
    """Returns the steps at which a metric is NaN or infinite. If a step was logged twice, the last value counts."""
    values = {step: row[key] for row in rows if key in row and (step := step_of(row)) is not None}
    return sorted(step for step, value in values.items() if not math.isfinite(value))


def thinned(whole: Curve, max_points: int = MAX_POINTS) -> Curve:
    """Downsamples to about `max_points` points: the first, the last, and the minimum and maximum of each interval, so
    that peaks are preserved.
    """
    count = len(whole.steps)
    if count <= max_points:
        return whole
    stretches = max(1, max_points // 2 - 1)
    kept = {0, count - 1}
    for number in range(stretches):
        begin, end = number * count // stretches, (number + 1) * count // stretches
        places = range(begin, end)
        kept |= {min(places, key=whole.values.__getitem__), max(places, key=whole.values.__getitem__)}
    order = sorted(kept)
    return Curve([whole.steps[i] for i in order], [whole.values[i] for i in order])


def running_mean(whole: Curve) -> Curve | None:
    """Returns the running mean of a long curve, or None for a short one."""
    count = len(whole.steps)
    if count < SMOOTHED_FROM:
        return None
    reach = max(1, count // WINDOW_PART)
    sums = [0.0]
    for value in whole.values:
        sums.append(sums[-1] + value)
    means = []
    for i in range(count):
        begin, end = max(0, i - reach), min(count, i + reach + 1)
        means.append((sums[end] - sums[begin]) / (end - begin))
    return thinned(Curve(whole.steps, means), MAX_POINTS // 2)


# --- non-overlapping parts of the step time

STEP_PARTS: Mapping[str, Sequence[str]] = {
    "wait for batch": ("perf/rollout_wait_time",),
    "memory hand-over": ("perf/offload_rollout_time", "perf/wake_up_time", "perf/keep_weights_time", "perf/sleep_time"),
    "train": ("perf/train_time",),
    "wait for generation": ("perf/generation_wait_time",),
    "weight sync": ("perf/update_weights_time",),
    "log-prob check": ("perf/check_log_probs_time",),
    "save": ("perf/save_model_time",),
    "evaluation": ("perf/eval_time",),
}
"""Part (in loop order) -> metrics whose sum is the time that the driver waited for it."""
NAMES = {key.removeprefix("perf/").removesuffix("_time"): part for part, keys in STEP_PARTS.items() for key in keys}
"""Driver span -> part."""
OTHER = "other"
"""The remainder of `perf/step_time`."""
OTHER_FROM = 0.02
"""The remainder is shown if it exceeds this fraction of the run."""
MAX_BARS = 120


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Time of each part per bar. A bar is one step or, in a long run, the mean of several steps."""

    steps: Sequence[float]
    """Center of each bar."""
    steps_per_bar: int
    parts: Mapping[str, Sequence[float]]
    """Part -> seconds per bar."""


def seconds_without_evaluation(rows: Sequence[Row]) -> list[float]:
    """Returns the seconds of each step, excluding evaluations."""
    evaluations = part_seconds(rows).get("evaluation", {})
    seconds = (value - evaluations.get(step, 0.0) for step, value in step_seconds(rows).items())
    return [value for value in seconds if value > 0]


def step_seconds(rows: Sequence[Row]) -> dict[int, float]:
    """Returns step -> seconds: the measured time, or else the sum of the parts."""
    measured = curve(rows, "perf/step_time")
    if measured:
        return {int(s): v for s, v in zip(measured.steps, measured.values, strict=True)}
    sums: dict[int, float] = {}
    for part in part_seconds(rows).values():
        for step, value in part.items():
            sums[step] = sums.get(step, 0.0) + value
    return sums


def part_seconds(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Returns part -> step -> seconds for the parts that occur in this run."""
    rows = [row for row in rows if AXES["perf"] in row]  # excludes the evaluation before step 0, on another axis
    out: dict[str, dict[int, float]] = {}
    for label, keys in STEP_PARTS.items():
        part: dict[int, float] = {}
        for key in keys:
            found = curve(rows, key)
            if not found and key == "perf/rollout_wait_time":
                found = curve(rows, "perf/rollout_time")  # this run did not log the driver's waiting time
            for step, value in zip(found.steps, found.values, strict=True):
                part[int(step)] = part.get(int(step), 0.0) + value
        if any(part.values()):
            out[label] = part
    return out


def step_times(rows: Sequence[Row], max_bars: int = MAX_BARS) -> StepTimes | None:
    """Returns the data for the plot of step times, or None if no time was logged."""
    parts = part_seconds(rows)
    if not parts:
        return None
    whole = step_seconds(rows)
    steps = sorted({step for part in parts.values() for step in part} | whole.keys())
    other = {s: max(0.0, whole.get(s, 0.0) - sum(part.get(s, 0.0) for part in parts.values())) for s in steps}
    if sum(other.values()) > OTHER_FROM * sum(whole.values()):
        parts[OTHER] = other
    per_bar = -(-len(steps) // max_bars)
    bars = [steps[i : i + per_bar] for i in range(0, len(steps), per_bar)]
    return StepTimes(
        [(bar[0] + bar[-1]) / 2 for bar in bars],
        per_bar,
        {label: [sum(part.get(s, 0.0) for s in bar) / len(bar) for bar in bars] for label, part in parts.items()},
    )
