"""The timeline of a step: the driver's spans between the end of the previous step and the end of this step.

A step ends when its timings are logged. The driver's traces also record when a batch was generated. Each row is a
(process, span name) pair. Overlapping spans in a row are merged, so a thousand parallel requests become one bar.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from slime.core.errors import DataError
from slime.observability.report.figure import COLORS, PART_COLORS
from slime.observability.report.markup import Markup, element, joined, seconds_text, short
from slime.observability.report.record import NAMES, Row, RunRecord
from slime.observability.spans import read_trace

MAX_ROWS, MAX_BARS_OF_ROW = 40, 200
EDGE = 0.003
"""A span that extends into a neighbouring step is shown if it covers at least this fraction of the step."""
MAX_TRACE_BYTES = 200 << 20
"""Maximum size of a trace. Larger ones need `slime trace`."""
WIDTH, LABEL, VALUE, ROW, TOP, BOTTOM = 960.0, 190.0, 70.0, 24.0, 8.0, 26.0

GENERATION = "generation"
"""Span for the rollout's concurrent work, recorded by the driver."""
BAR_COLORS = PART_COLORS | {GENERATION: len(COLORS)}
"""The same colours as in the plot of step times."""


@dataclass(frozen=True, slots=True)
class Span:
    process: str
    name: str
    begin_s: float
    """Unix time."""
    end_s: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of the timeline."""

    process: str
    name: str
    stretches: Sequence[tuple[float, float]]
    """(start, end) pairs in seconds since the start of the step."""

    @property
    def seconds(self) -> float:
        return sum(end - begin for begin, end in self.stretches)


@dataclass(frozen=True, slots=True)
class Timeline:
    step: int
    seconds: float
    bars: Sequence[Bar]


def timelines(record: RunRecord) -> list[Timeline]:
    """Returns the median step and, if it took over 1.5 times as long, the slowest step. Empty without traces."""
    windows = step_windows(record.rows)
    if not windows:
        return []
    spans = sorted((span for path in record.traces for span in _spans(path)), key=lambda span: span.begin_s)
    seconds = {step: end - begin for step, (begin, end) in windows.items()}
    covered = _covered(spans, windows)
    if not covered:
        return []
    median = statistics.median_low(seconds[step] for step in covered)
    typical = next(step for step in reversed(covered) if seconds[step] == median)
    slowest = max(covered, key=seconds.__getitem__)
    chosen = [typical, slowest] if seconds[slowest] > 1.5 * median else [typical]
    return [Timeline(step, seconds[step], _bars(spans, *windows[step])) for step in chosen]


def _covered(spans: Sequence[Span], windows: Mapping[int, tuple[float, float]]) -> list[int]:
    """Returns the steps that overlap with any span. `spans` must be sorted by start."""
    begins = [span.begin_s for span in spans]
    latest = list(accumulate((span.end_s for span in spans), max))  # running maximum of the end times
    count = {step: bisect_left(begins, end) for step, (_, end) in windows.items()}
    return [step for step, (begin, _) in windows.items() if count[step] and latest[count[step] - 1] > begin]


def step_windows(rows: Sequence[Row]) -> dict[int, tuple[float, float]]:
    """Returns step -> (start, end) in Unix time, for steps with logged timings."""
    return {
        int(row["rollout/step"]): (row["time"] - row["perf/step_time"], row["time"])
        for row in rows
        if "perf/step_time" in row and "rollout/step" in row and "time" in row and row["perf/step_time"] > 0
    }


def _spans(path: Path) -> Iterator[Span]:
    try:
        events = read_trace(path) if path.stat().st_size <= MAX_TRACE_BYTES else []
    except (OSError, ValueError, DataError):
        return
    names = {event.get("pid"): str(event["args"]["name"]) for event in events if event.get("name") == "process_name"}
    for event in events:
        if event.get("ph") == "X":
            process = names.get(event.get("pid"), path.stem)
            begin_s = event["ts"] / 1e6
            name = str(event["name"])
            yield Span(process, NAMES.get(name, name), begin_s, begin_s + event["dur"] / 1e6)


def _inside(span: Span, begin_s: float, end_s: float) -> bool:
    return span.end_s > begin_s and span.begin_s < end_s


def _bars(spans: Sequence[Span], begin_s: float, end_s: float) -> list[Bar]:
    """Returns the rows of a step, ordered by first span, grouped by process. `spans` must be sorted by start."""
    rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in spans:
        if _inside(span, begin_s, end_s):
            begin, end = max(span.begin_s, begin_s) - begin_s, min(span.end_s, end_s) - begin_s
            is_whole = end - begin >= span.end_s - span.begin_s
            if is_whole or end - begin >= EDGE * (end_s - begin_s):
                rows.setdefault((span.process, span.name), []).append((begin, end))
    processes = list(dict.fromkeys(process for process, _ in rows))
    ordered = sorted(rows.items(), key=lambda item: (processes.index(item[0][0]), item[1][0]))
    return [Bar(process, name, _merged(stretches)) for (process, name), stretches in ordered[:MAX_ROWS]]


def _merged(stretches: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merges overlapping spans, then neighbouring ones until there are at most `MAX_BARS_OF_ROW`."""
    merged: list[tuple[float, float]] = []
    for begin, end in stretches:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    while len(merged) > MAX_BARS_OF_ROW:
        merged = [
            (one[0], two[1])
            for one, two in zip(merged[::2], [*merged[1::2], *merged[-1:]][: len(merged[::2])], strict=True)
        ]
    return merged


def timeline_figure(timeline: Timeline) -> Markup:
    """Draws one row per span name, labelled with its total time."""
    from matplotlib.ticker import MaxNLocator

    height = TOP + ROW * len(timeline.bars) + BOTTOM
    right, bottom = WIDTH - VALUE, height - BOTTOM
    scale = (right - LABEL) / timeline.seconds
    made: list[Markup] = []
    for tick in MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]).tick_values(0.0, timeline.seconds):
        if tick > timeline.seconds:
            break
        x = f"{LABEL + tick * scale:.1f}"
        made.append(element("line", class_="grid", x1=x, x2=x, y1=TOP, y2=bottom))
        made.append(element("text", f"{short(round(tick, 6))} s", x=x, y=bottom + 17, text_anchor="middle"))
    several = len({bar.process for bar in timeline.bars}) > 1
    for number, bar in enumerate(timeline.bars):
        y = TOP + ROW * number
        label = f"{bar.process}: {bar.name}" if several else bar.name
        boxes = "".join(_box(begin, end, y, scale) for begin, end in bar.stretches)
        told = element("title", f"{label}: {seconds_text(bar.seconds)}")
        made.append(element("text", _fitting(label), x=LABEL - 10, y=y + 16, text_anchor="end", class_="name"))
        made.append(element("path", told, d=boxes, class_=f"bar c{BAR_COLORS.get(bar.name, len(COLORS) - 1)}"))
        made.append(element("text", seconds_text(bar.seconds), x=right + 10, y=y + 16, class_="name"))
    said = "; ".join(f"{bar.name} {seconds_text(bar.seconds)}" for bar in timeline.bars)
    return element(
        "svg",
        joined(*made),
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label=f"Timeline of step {timeline.step}: {said}",
        class_="timeline",
    )


def _box(begin_s: float, end_s: float, y: float, scale: float) -> str:
    left = LABEL + begin_s * scale
    wide = max((end_s - begin_s) * scale, 1.5)
    return f"M{left:.1f} {y + 4:.1f}h{wide:.1f}v{ROW - 8:.1f}h-{wide:.1f}z"


def _fitting(label: str) -> str:
    return label if len(label) <= 28 else f"{label[:27]}…"
