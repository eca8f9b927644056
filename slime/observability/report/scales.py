"""The axes of a panel: from where to where, and how numbers are written. One answer for the picture and the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slime.observability.report.markup import percent, short
from slime.observability.report.panels import Drawn
from slime.observability.report.record import RunRecord, StepTimes, step_of

ROOM = 0.08
"""Part of the span that stays free above and below a curve."""
ROOM_ABOVE_ONE = 0.05
"""So that the line of 100 % does not touch the title."""
MARKERS_UP_TO = 40
"""A curve of at most so many steps shows each of them."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What all panels share: the first and last step, and the steps at which the run was resumed."""

    limits: tuple[int, int]
    marks: Sequence[float]


def frame_of(record: RunRecord) -> Frame:
    """The frame of a run."""
    limits = step_limits(record)
    return Frame(limits, marks(record.resumed_at, limits))


def step_limits(record: RunRecord) -> tuple[int, int]:
    """First and last step of the whole run: every panel has the same axis, so that they can be compared."""
    steps = [step for row in record.rows if (step := step_of(row)) is not None]
    return min(steps, default=0), max(steps, default=0)


def value_limits(drawn: Drawn) -> tuple[float, float]:
    """Lowest and highest value that the panel shows."""
    curves = [one.curve for one in drawn.series] + list(drawn.band or ())
    values = [value for one in curves for value in one.values]
    low, high = min(values), max(values)
    if drawn.scale == "log":
        low = min(value for value in values if value > 0)
        return min(low / 1.5, high / 20), high * 1.5
    if drawn.scale == "share" or (drawn.scale == "unit" and low >= 0 and high <= 1):
        return 0.0, 1.0 + ROOM_ABOVE_ONE
    if drawn.scale in ("zero", "percent") and low >= 0:
        return 0.0, high * (1 + ROOM) or (0.01 if drawn.scale == "percent" else 1.0)
    room = ROOM * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def seconds_limit(times: StepTimes) -> float:
    """The height of the picture of the parts."""
    sums = [sum(part[i] for part in times.parts.values()) for i in range(len(times.steps))]
    return (1 + ROOM) * max(sums, default=0.0) or 1.0


def written(value: float, drawn: Drawn) -> str:
    """A value of the panel."""
    return percent(value) if drawn.scale in ("share", "percent") else short(value)


def unit_of(drawn: Drawn) -> str:
    """Unit and kind of the vertical axis, as the title has them."""
    return ", ".join(part for part in (drawn.panel.unit, "log scale" if drawn.scale == "log" else "") if part)


def in_words(panels: Iterable[Drawn]) -> str:
    """What is said of the panels that never change; empty if there is none."""
    said = []
    for drawn in (one for one in panels if one.in_words):
        values = [f"{one.label} {written(one.curve.last, drawn)}" for one in drawn.series]
        values = values if len(values) > 1 else [written(drawn.series[0].curve.last, drawn)]
        unit = f" {drawn.panel.unit}" if drawn.panel.unit else ""
        said.append(f"{drawn.panel.title.lower()} {', '.join(values)}{unit}")
    return f"the same in every step: {'; '.join(said)}" if said else ""


def headline(drawn: Drawn) -> str:
    """First and last value, where the panel has one curve and so room to say it."""
    if len(drawn.series) != 1:
        return ""
    values = drawn.series[0].curve
    first, last = written(values.first, drawn), written(values.last, drawn)
    return last if len(values.values) == 1 else f"{first} → {last}"


def marks(resumed_at: Iterable[int], limits: tuple[int, int]) -> Sequence[float]:
    """Where a line says that the run was resumed: between the last step before and the first after."""
    return [step - 0.5 for step in sorted(set(resumed_at)) if limits[0] < step <= limits[1]]
