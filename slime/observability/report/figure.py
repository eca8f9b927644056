"""The picture of a run: `report.png`, drawn by matplotlib. Legends stand above the axes, so nothing covers a curve."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.observability.report.markup import log_ticks, short
from slime.observability.report.panels import Drawn
from slime.observability.report.record import (
    OTHER,
    STEP_PARTS,
    Curve,
    RunKind,
    RunRecord,
    StepTimes,
    running_mean,
    step_times,
    thinned,
)
from slime.observability.report.scales import (
    MARKERS_UP_TO,
    Frame,
    frame_of,
    headline,
    in_words,
    seconds_limit,
    unit_of,
    value_limits,
    written,
)
from slime.observability.report.summary import RunSummary, summary_of

COLORS = ("#2563c9", "#d9730d", "#23935a", "#c93a3a", "#7d4fc2", "#12858f", "#a0527c", "#6b7280")
PART_COLORS = dict(zip(STEP_PARTS, (COLORS[i] for i in (0, 6, 1, 7, 2, 5, 4, 3)), strict=True)) | {OTHER: "#b6bcc6"}
INK, MUTED, GRID, MARK = "#1f2430", "#6b7280", "#e4e7ec", "#8b93a1"
LEGEND_CHARS = 57
"""Characters of a legend that fit on one line above a panel."""
PANEL_INCHES = (4.7, 2.75)
HEADER_INCHES, FOOTER_INCHES = 0.78, 0.46
FOOTER_CHARS_PER_INCH = 13
SETTINGS: Any = {
    "font.size": 10,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
}


def write_picture(record: RunRecord, panels: Sequence[Drawn], out: Path, title: str) -> None:
    """Draws the panels that belong into the picture, and the parts of a step, into a PNG."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        drawn = [one for one in panels if one.panel.in_picture and not one.in_words]
        _write_picture(record, drawn, in_words(panels), out, title)


def _write_picture(record: RunRecord, panels: Sequence[Drawn], constant: str, out: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    times, frame = step_times(record.rows), frame_of(record)
    count = len(panels) + (times is not None)
    columns = min(count, 3 if count > 4 else 2) or 1
    rows = max(1, math.ceil(count / columns))
    width, height = max(columns, 2) * PANEL_INCHES[0], rows * PANEL_INCHES[1] + HEADER_INCHES + FOOTER_INCHES
    room = (0.004, FOOTER_INCHES / height, 0.992, 1 - (HEADER_INCHES + FOOTER_INCHES) / height)
    engine = ConstrainedLayoutEngine(rect=room, w_pad=0.12, h_pad=0.1, hspace=0.03, wspace=0.02)
    figure = Figure(figsize=(width, height), dpi=120, layout=engine)
    FigureCanvasAgg(figure)  # no pyplot: its global state is not ours to change
    _header(figure, record, summary_of(record), title)
    _footer(figure, frame, constant)
    cells = figure.add_gridspec(rows, columns)
    spans = [(i // columns, slice(i % columns, i % columns + 1)) for i in range(count)]
    spans[-1:] = [(row, slice(cell.start, None)) for row, cell in spans[-1:]]  # the last one takes what is left
    grid = [figure.add_subplot(cells[row, cell]) for row, cell in spans]
    lines = [legend_lines(_labels(drawn)) for drawn in panels]
    lines += [legend_lines(list(times.parts))] if times is not None else []
    in_row = [max(lines[i - i % columns :][:columns]) for i in range(count)]  # titles of a row stand on one line
    for axes, drawn, room_above in zip(grid, panels, in_row, strict=False):
        _draw(axes, drawn, frame, room_above)
    if times is not None:
        _draw_parts(grid[len(panels)], times, frame, in_row[-1])
    partial = out.with_name(f".{out.name}.partial")
    figure.savefig(partial, facecolor="white", format="png")
    partial.replace(out)


def _header(figure: Any, record: RunRecord, summary: RunSummary, title: str) -> None:
    width, height = figure.get_size_inches()
    facts = [record.kind.value]
    if record.kind is not RunKind.EVALUATION:
        facts.append(f"{summary.num_rollouts:,} steps")
    if summary.step_s is not None:
        facts.append(f"{short(summary.step_s)} s per step without evaluation")
    if summary.findings:
        facts.append("warnings: " + ", ".join(dict.fromkeys(one.kind for one in summary.findings)))
    left, top = 0.14 / width, 1 - 0.1 / height
    shown = title if len(title) < 90 else f"{title[:88]}…"
    figure.text(left, top, shown, fontsize=15, fontweight="bold", va="top", parse_math=False)
    figure.text(left, top - 0.34 / height, "  ·  ".join(facts), fontsize=10, color=MUTED, va="top", parse_math=False)


def _footer(figure: Any, frame: Frame, constant: str) -> None:
    width, height = figure.get_size_inches()
    notes = ["x: steps as in metrics.jsonl, from 0" + (" (-1: before the first)" if frame.limits[0] < 0 else "")]
    if frame.marks:
        notes.append("dotted line: the run was resumed")
    if frame.limits[1] >= 100:
        notes.append("pale: every step, strong: running mean")
    notes += [constant] if constant else []
    left, bottom = 0.14 / width, 0.1 / height
    said = textwrap.fill("  ·  ".join(notes), int(FOOTER_CHARS_PER_INCH * width))
    figure.text(left, bottom, said, fontsize=9, color=MUTED, va="bottom", parse_math=False)


def _style(axes: Any, title: str, unit: str, value: str, frame: Frame, legend_lines: int) -> None:
    from matplotlib.ticker import MaxNLocator

    pad = 6 + 15 * legend_lines
    full = f"{title}, {unit}" if unit else title
    axes.set_title(full, loc="left", fontsize=11.5, fontweight="bold", pad=pad, parse_math=False)
    if value:
        axes.set_title(value, loc="right", fontsize=10, color=MUTED, pad=pad)
    low, high = frame.limits
    room = max(0.03 * (high - low), 0.5)
    axes.set_xlim(low - room, high + room)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    axes.grid(True, axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MARK)
    axes.tick_params(axis="both", length=0, labelsize=9)
    for mark in frame.marks:
        axes.axvline(mark, color=MARK, linewidth=1, linestyle=(0, (1.5, 2)), zorder=1)


def _legend(axes: Any, labels: Sequence[str]) -> None:
    """Above the axes, below the title."""
    if labels:
        columns = max(1, math.ceil(len(labels) / legend_lines(labels)))
        place = {"loc": "lower left", "bbox_to_anchor": (-0.012, 0.985), "borderaxespad": 0.0}
        axes.legend(
            **place, ncols=columns, frameon=False, fontsize=9, handlelength=1.3, columnspacing=1.2, labelcolor=INK
        )


def legend_lines(labels: Sequence[str]) -> int:
    """Lines that a legend takes above a panel."""
    return math.ceil(sum(len(label) + 6 for label in labels) / LEGEND_CHARS) if labels else 0


def _labels(drawn: Drawn) -> list[str]:
    """What a legend says; a single curve is named by its title."""
    labels = [one.label for one in drawn.series]
    if drawn.band:
        return [f"{labels[0]} (band: least to greatest)", *labels[1:]]
    return labels if drawn.is_named else []


def _draw(axes: Any, drawn: Drawn, frame: Frame, room_above: int) -> None:
    """`room_above`: lines of legend above the panels of this row."""
    from matplotlib.ticker import FixedLocator, NullLocator

    _style(axes, drawn.panel.title, unit_of(drawn), headline(drawn), frame, room_above)
    limits = value_limits(drawn)
    if drawn.scale == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(log_ticks(*limits)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: written(value, drawn))
    axes.set_ylim(*limits)
    if drawn.band is not None:
        least, greatest = (thinned(one) for one in drawn.band)
        axes.fill_between(greatest.steps, _at(least, greatest), greatest.values, color=COLORS[0], alpha=0.12, lw=0)
    labels = _labels(drawn)
    names = labels or [one.label for one in drawn.series]
    for color, name, one in zip(COLORS * len(drawn.series), names, drawn.series, strict=False):
        _draw_curve(axes, one.curve, color, name, one.dashed)
    _legend(axes, labels)


def _draw_curve(axes: Any, whole: Curve, color: str, label: str, dashed: bool) -> None:
    points, mean = thinned(whole), running_mean(whole)
    style: dict[str, Any] = {"color": color, "linestyle": (0, (3, 1.6)) if dashed else "-", "clip_on": False}
    if mean is None:
        marker = "o" if len(points.steps) <= MARKERS_UP_TO else None
        axes.plot(points.steps, points.values, marker=marker, markersize=3.4, linewidth=1.6, label=label, **style)
        return
    axes.plot(points.steps, points.values, linewidth=0.8, alpha=0.3, **style)
    axes.plot(mean.steps, mean.values, linewidth=1.8, label=label, **style)


def _at(one: Curve, other: Curve) -> list[float]:
    """Values of `one` at about the steps of `other`."""
    import numpy as np

    return [float(v) for v in np.interp(other.steps, one.steps, one.values)]


def _draw_parts(axes: Any, times: StepTimes, frame: Frame, room_above: int) -> None:
    _style(axes, "Where the time of a step goes", "s", "", frame, room_above)
    bottom = [0.0] * len(times.steps)
    for label, seconds in times.parts.items():
        width = times.steps_per_bar * (0.74 if len(times.steps) <= MARKERS_UP_TO else 1.0)
        axes.bar(times.steps, seconds, bottom=bottom, label=label, color=PART_COLORS[label], width=width, linewidth=0)
        bottom = [low + part for low, part in zip(bottom, seconds, strict=True)]
    axes.set_ylim(0, seconds_limit(times))
    _legend(axes, list(times.parts))
