"""Where the time of a step goes: its parts, none of which contains another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime.observability.report.curves import curve
from slime.observability.report.record import Row
from slime.observability.sinks import AXES

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
"""In the order of the loop, with the metrics that sum to each: how long the driver waited for it."""
NAMES = {key.removeprefix("perf/").removesuffix("_time"): part for part, keys in STEP_PARTS.items() for key in keys}
"""Span of the driver -> its part."""
OTHER = "other"
"""What no part explains of `perf/step_time`."""
OTHER_FROM = 0.02
"""It is a part of its own from this share of the run."""
MAX_BARS = 120


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of each part, by step or, in a long run, by the mean of steps next to each other."""

    steps: Sequence[float]
    """The middle of the steps that a bar stands for."""
    steps_per_bar: int
    parts: Mapping[str, Sequence[float]]
    """Part -> seconds, one for each bar; zero where a step had none."""


def seconds_without_evaluation(rows: Sequence[Row]) -> list[float]:
    """Seconds of each step that took time, an evaluation in it left out."""
    evaluations = part_seconds(rows).get("evaluation", {})
    seconds = (value - evaluations.get(step, 0.0) for step, value in step_seconds(rows).items())
    return [value for value in seconds if value > 0]


def step_seconds(rows: Sequence[Row]) -> dict[int, float]:
    """Seconds of each step: as measured around all of it, else the sum of its parts."""
    measured = curve(rows, "perf/step_time")
    if measured:
        return {int(s): v for s, v in zip(measured.steps, measured.values, strict=True)}
    sums: dict[int, float] = {}
    for part in part_seconds(rows).values():
        for step, value in part.items():
            sums[step] = sums.get(step, 0.0) + value
    return sums


def part_seconds(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Part -> step -> seconds, without the parts that this run does not have."""
    rows = [row for row in rows if AXES["perf"] in row]  # the evaluation before step 0 has an axis of its own
    out: dict[str, dict[int, float]] = {}
    for label, keys in STEP_PARTS.items():
        part: dict[int, float] = {}
        for key in keys:
            found = curve(rows, key)
            if not found and key == "perf/rollout_wait_time":
                found = curve(rows, "perf/rollout_time")  # of a run that did not log how long the driver waited
            for step, value in zip(found.steps, found.values, strict=True):
                part[int(step)] = part.get(int(step), 0.0) + value
        if any(part.values()):
            out[label] = part
    return out


def step_times(rows: Sequence[Row], max_bars: int = MAX_BARS) -> StepTimes | None:
    """What the picture of the parts shows; None if no time was logged."""
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
