"""Draws the panels with matplotlib: as an image (`report.png`), and as SVG for the cards of the HTML page.

matplotlib's SVG is adapted to the page: the content security policy forbids `style`, ids must be unique within a page,
and dark mode uses different colours. The `data-*` attributes of each curve contain the values that page.js shows under
the pointer.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core.text import listed, step_name
from slime.observability.report.markup import Markup, element, percent, seconds_text, short
from slime.observability.report.panels import Drawn, Series
from slime.observability.report.record import (
    OTHER,
    STEP_PARTS,
    RunKind,
    RunRecord,
    StepTimes,
    running_mean,
    step_of,
    step_times,
    thinned,
)
from slime.observability.report.summary import RunSummary, summary_of

COLORS = ("#2563c9", "#d9730d", "#23935a", "#c93a3a", "#7d4fc2", "#12858f", "#a0527c", "#6b7280")
"""The same colours as in page.css, which has other colours for dark mode."""
OTHER_COLOR = "#b6bcc6"
PART_COLORS = dict(zip(STEP_PARTS, (0, 6, 1, 7, 2, 5, 4, 3), strict=True))
"""Part of a step -> colour index."""
INK, MUTED, GRID, MARK = "#1b2029", "#626b7a", "#e3e6eb", "#8b93a1"
CLASSES = {color: f"c{i}" for i, color in enumerate((*COLORS, OTHER_COLOR))}
VARIABLES = CLASSES | {MUTED: "muted", GRID: "grid", MARK: "mark"}
"""Colour -> variable in page.css."""
PARTS_TITLE = "Where the time of a step goes"
ROOM = 0.08
"""Margin above and below a curve, as a fraction of its range."""
ROOM_ABOVE_ONE = 0.05
"""Margin that keeps a curve at 100 % away from the title."""
SMALL_SHARE = 0.1
"""If all values of a 0-to-1 panel are below this, its axis ends at the largest value."""
ROUNDING = 1e-5
"""A curve with a smaller relative change counts as constant, because the change is only rounding."""
MARKERS_UP_TO = 40
"""Curves with at most this many steps have a marker at each step."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The x axis shared by all panels, so that they can be compared."""

    limits: tuple[int, int]
    """First and last step of the run."""
    marks: Sequence[float]
    """Positions of the dotted lines that mark a resume, halfway between the steps before and after it."""


def frame_of(record: RunRecord) -> Frame:
    steps = [step for row in record.rows if (step := step_of(row)) is not None]
    first, last = min(steps, default=0), max(steps, default=0)
    return Frame((first, last), [step - 0.5 for step in sorted(set(record.resumed_at)) if first < step <= last])


# --- axes and curves, the same for image and page


def draw_panel(axes: Any, drawn: Drawn, frame: Frame, names: Sequence[str] = ()) -> None:
    """Draws curves, band, grid and tick labels. `names`: legend labels. The id of curve i is `series-i`."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = value_limits(drawn)
    if drawn.scale == "log":
        axes.set_yscale("log")
        between = (1.0, 2.0, 5.0) if high / low <= 100 else (1.0, 3.0) if high / low <= 3000 else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=between, numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: written(value, drawn))
    _draw_frame(axes, frame, (low, high))
    if drawn.band is not None:
        least, greatest = (thinned(one) for one in drawn.band)
        steps, values = [*greatest.steps, *least.steps[::-1]], [*greatest.values, *least.values[::-1]]
        axes.fill(steps, values, color=COLORS[0], alpha=0.12, linewidth=0)
    for i, one in enumerate(drawn.series):
        points, mean = thinned(one.curve), running_mean(one.curve)
        style: dict[str, Any] = {"color": COLORS[i % len(COLORS)], "linestyle": (0, (3, 1.6)) if one.dashed else "-"}
        style |= {"label": names[i] if names else None, "clip_on": False}
        if mean is None:
            marker = "o" if len(points.steps) <= MARKERS_UP_TO else None
            (line,) = axes.plot(points.steps, points.values, marker=marker, markersize=4, linewidth=1.7, **style)
        else:
            (line,) = axes.plot(points.steps, points.values, linewidth=0.9, alpha=0.3, **(style | {"label": None}))
            axes.plot(mean.steps, mean.values, linewidth=1.8, **style)
        line.set_gid(f"series-{i}")


def draw_parts(axes: Any, times: StepTimes, frame: Frame) -> None:
    """Draws the parts of a step as stacked bars. The id of part i is `series-i`."""
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    heights = [sum(part[i] for part in times.parts.values()) for i in range(len(times.steps))]
    _draw_frame(axes, frame, (0.0, (1 + ROOM) * max(heights, default=0.0) or 1.0))
    half = times.steps_per_bar * (0.37 if len(times.steps) <= MARKERS_UP_TO else 0.5)
    steps, low = np.asarray(times.steps), np.zeros(len(times.steps))
    for i, (part, seconds) in enumerate(times.parts.items()):
        high = low + np.asarray(seconds)
        corners = [(steps - half, low), (steps - half, high), (steps + half, high), (steps + half, low)]
        bars = np.stack([np.stack(corner, -1) for corner in corners], 1)[high > low]
        outline = Outline.make_compound_path_from_polys(bars)
        axes.add_patch(PathPatch(outline, color=part_color(part), linewidth=0, label=part, gid=f"series-{i}"))
        low = high


def part_color(part: str) -> str:
    return OTHER_COLOR if part == OTHER else COLORS[PART_COLORS[part]]


def _draw_frame(axes: Any, frame: Frame, limits: tuple[float, float]) -> None:
    from matplotlib.ticker import MaxNLocator

    low, high = frame.limits
    room = max(0.03 * (high - low), 0.5)
    axes.set_xlim(low - room, high + room)
    axes.set_ylim(*limits)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(True, axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MARK)
    axes.tick_params(axis="both", length=0, pad=5, labelsize=10, labelcolor=MUTED)
    for mark in frame.marks:
        axes.axvline(
            mark, color=MARK, linewidth=1, linestyle=(0, (1.5, 2)), zorder=1, gid=f"resumed with step {mark + 0.5:g}"
        )


def value_limits(drawn: Drawn) -> tuple[float, float]:
    """Returns the limits of the panel's y axis."""
    curves = [one.curve for one in drawn.series] + list(drawn.band or ())
    values = [value for one in curves for value in one.values]
    low, high = min(values), max(values)
    if drawn.scale == "log":
        low = min(value for value in values if value > 0)
        return min(low / 1.5, high / 20), high * 1.5
    if drawn.scale in ("share", "unit") and low >= 0 and 0 < high < SMALL_SHARE:
        return 0.0, high * (1 + ROOM)
    if drawn.scale == "share" or (drawn.scale == "unit" and low >= 0 and high <= 1):
        return 0.0, 1.0 + ROOM_ABOVE_ONE
    if drawn.scale in ("zero", "percent") and low >= 0:
        return 0.0, high * (1 + ROOM) or (0.01 if drawn.scale == "percent" else 1.0)
    size = max(abs(low), abs(high))
    room = ROOM * (high - low) if high - low > ROUNDING * size else 0.1 * size or 1.0  # do not magnify rounding
    return low - room, high + room


# --- text about a panel


def written(value: float, drawn: Drawn) -> str:
    return percent(value) if drawn.scale in ("share", "percent") else short(value)


def unit_of(drawn: Drawn) -> str:
    return ", ".join(part for part in (drawn.panel.unit, "log scale" if drawn.scale == "log" else "") if part)


def headline(drawn: Drawn) -> str:
    """Returns the first and last value of a panel with a single curve, as text."""
    if len(drawn.series) != 1:
        return ""
    curve = drawn.series[0].curve
    first, last = written(curve.first, drawn), written(curve.last, drawn)
    return last if len(curve.values) == 1 else f"{first} → {last}"


def lost_text(drawn: Drawn) -> str:
    """Returns a sentence that names the steps with NaN or infinity, which are not plotted; "" if there are none."""
    if not drawn.lost:
        return ""
    return f" Not drawn, because NaN or infinite: {listed([step_name(step) for step in drawn.lost])}."


def in_words(panels: Iterable[Drawn]) -> str:
    """Returns one sentence about the panels with constant values, or "" if there are none."""
    said = []
    for drawn in (one for one in panels if one.in_words):
        values = [f"{one.label} {written(one.curve.last, drawn)}" for one in drawn.series]
        values = values if len(values) > 1 else [written(drawn.series[0].curve.last, drawn)]
        unit = f" {drawn.panel.unit}" if drawn.panel.unit else ""
        said.append(f"{drawn.panel.title.lower()} {', '.join(values)}{unit}")
    return f"the same in every step: {'; '.join(said)}" if said else ""


# --- cards of the page

WIDTH, HEIGHT = 460.0, 220.0
"""Size of a panel on the page, in points."""
LEFT, RIGHT, TOP, BOTTOM = 48.0, 12.0, 10.0, 24.0


def svg_of(draw: Callable[[Any], None]) -> tuple[str, tuple[float, float]]:
    """Returns an SVG image of the axes drawn by `draw`, and the limits of their x axis."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
    place = (LEFT / WIDTH, BOTTOM / HEIGHT, (WIDTH - LEFT - RIGHT) / WIDTH, (HEIGHT - TOP - BOTTOM) / HEIGHT)
    axes = figure.add_axes(place)
    draw(axes)
    figure.text(2 / WIDTH, 0.035, "step", fontsize=9, color=MUTED)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(out, format="svg", transparent=True)
    return out.getvalue(), axes.get_xlim()


def panel_figure(drawn: Drawn, frame: Frame) -> Markup:
    title = drawn.panel.title
    data, entries = {}, []
    for i, one in enumerate(drawn.series):
        color, points = f"c{i % len(COLORS)}", thinned(one.curve)
        values = " ".join(written(value, drawn).replace(" ", "") for value in points.values)
        data[f"series-{i}"] = _data(color, one.label or title, points.steps, values)
        if drawn.is_named:
            entries.append((color, one.label, written(one.curve.last, drawn), one.dashed))
    said = "; ".join(_said(one, drawn) for one in drawn.series)
    svg, steps = svg_of(lambda axes: draw_panel(axes, drawn, frame))
    picture = _picture(svg, steps, f"{title}: {said}", data)
    return _card(title, unit_of(drawn), f"{drawn.panel.about}{lost_text(drawn)}", headline(drawn), entries, picture)


def parts_figure(times: StepTimes, frame: Frame) -> Markup:
    data, entries = {}, []
    for i, (part, seconds) in enumerate(times.parts.items()):
        color = f"p {CLASSES[part_color(part)]}"
        data[f"series-{i}"] = _data(color, part, times.steps, " ".join(map(short, seconds)))
        entries.append((color, part, seconds_text(sum(seconds) / len(seconds)), False))
    about = "What the driver waited for. The parts do not overlap. The legend shows their means."
    if times.steps_per_bar > 1:
        about += f" Each bar is the mean of {times.steps_per_bar} steps."
    said = "; ".join(f"{name}: mean {value}" for _, name, value, _ in entries)
    svg, steps = svg_of(lambda axes: draw_parts(axes, times, frame))
    return _card(PARTS_TITLE, "s", about, "", entries, _picture(svg, steps, f"{PARTS_TITLE}: {said}", data))


def _card(
    title: str, unit: str, about: str, value: str, entries: Sequence[tuple[str, str, str, bool]], picture: Markup
) -> Markup:
    """Builds a card. `entries`: legend entries (colour class, name, value, dashed)."""
    head = [element("h3", title, element("span", f" {unit}", class_="unit") if unit else None)]
    if value:
        head.append(element("span", value, class_="value"))
    legend = [
        element("li", element("i", class_=f"swatch {'dashed ' if dashed else ''}{color}"), name, element("b", last))
        for color, name, last, dashed in entries
    ]
    return element(
        "figure",
        element("figcaption", element("div", *head, class_="head"), element("p", about)),
        element("ul", *legend, class_="legend") if legend else None,
        picture,
        class_="card",
    )


def _data(color: str, name: str, steps: Sequence[float], values: str) -> Mapping[str, str]:
    """Returns the attributes of a curve's SVG group, for page.js."""
    numbers = " ".join(f"{step:g}" if abs(step) < 1e5 else f"{step:.1f}".removesuffix(".0") for step in steps)
    return {"class_": f"series {color}", "data_name": name, "data_x": numbers, "data_y": values}


def _said(one: Series, drawn: Drawn) -> str:
    values = one.curve.values
    first, last, least, most = (written(v, drawn) for v in (values[0], values[-1], min(values), max(values)))
    return f"{one.label or drawn.panel.title} from {first} to {last}, minimum {least}, maximum {most}"


def _picture(svg: str, steps: tuple[float, float], said: str, data: Mapping[str, Mapping[str, str]]) -> Markup:
    """Adapts an SVG image to the page. `data`: id of a group in the image -> its attributes on the page."""
    inside = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    inside = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", inside, flags=re.S)
    inside = re.sub(r'style="([^"]*)"', lambda found: _attributes(found[1]), inside)
    inside = re.sub(r'="[^"]*"', _rounded, inside)
    inside = re.sub(r"\s+", " ", inside)
    for color, name in VARIABLES.items():
        inside = inside.replace(color, f"var(--{name})")
    inside = re.sub(r'<g id="(resumed [^"]*)">', r"<g><title>\1</title>", inside)
    inside = re.sub(r'<g id="([^"]*)"', lambda found: _opened(data.get(found[1], {})), inside)
    cross = element("line", class_="cross", y1=TOP, y2=HEIGHT - BOTTOM, x1=-9, x2=-9)
    return element(
        "svg",
        Markup(inside),
        cross,
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        aria_label=said,
        data_axis=f"{steps[0]:g} {steps[1]:g} {LEFT:g} {WIDTH - RIGHT:g} {WIDTH:g}",
        class_="chart",
    )


def _attributes(style: str) -> str:
    """Converts a `style` value to attributes. Drops fonts, which the page sets."""
    pairs = [one.split(":", 1) for one in style.split(";") if ":" in one]
    return " ".join(f'{key.strip()}="{value.strip()}"' for key, value in pairs if "font" not in key)


def _rounded(value: re.Match[str]) -> str:
    """Rounds the numbers in an attribute to one decimal, because more would not be visible."""
    return re.sub(r"(\.\d)\d{2,}", r"\1", value[0])


def _opened(attributes: Mapping[str, str]) -> str:
    return element("g", **attributes).removesuffix("></g>")


# --- all panels in one image. Legends are above the axes, so they never cover a curve.

LEGEND_CHARS = 57
"""Number of legend characters that fit on one line above a panel."""
PANEL_INCHES = (4.7, 2.75)
HEADER_INCHES, FOOTER_INCHES = 0.78, 0.46
FOOTER_CHARS_PER_INCH = 13


def write_picture(record: RunRecord, panels: Sequence[Drawn], out: Path, title: str) -> None:
    """Writes a PNG with the panels and the plot of step times."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    shown = [one for one in panels if one.panel.in_picture and not one.in_words]
    times, frame = step_times(record.rows), frame_of(record)
    count = len(shown) + (times is not None)
    columns = min(count, 3 if count > 4 else 2) or 1
    rows = max(1, math.ceil(count / columns))
    width, height = max(columns, 2) * PANEL_INCHES[0], rows * PANEL_INCHES[1] + HEADER_INCHES + FOOTER_INCHES
    room = (0.004, FOOTER_INCHES / height, 0.992, 1 - (HEADER_INCHES + FOOTER_INCHES) / height)
    engine = ConstrainedLayoutEngine(rect=room, w_pad=0.12, h_pad=0.1, hspace=0.03, wspace=0.02)
    figure = Figure(figsize=(width, height), dpi=120, layout=engine)
    FigureCanvasAgg(figure)  # pyplot would change global state
    _header(figure, record, summary_of(record), title)
    _footer(figure, frame, in_words(panels))
    cells = figure.add_gridspec(rows, columns)
    spans = [(i // columns, slice(i % columns, i % columns + 1)) for i in range(count)]
    spans[-1:] = [(row, slice(cell.start, None)) for row, cell in spans[-1:]]  # the last panel fills the row
    grid = [figure.add_subplot(cells[row, cell]) for row, cell in spans]
    legends = [_labels(drawn) for drawn in shown] + ([list(times.parts)] if times is not None else [])
    lines = [legend_lines(labels) for labels in legends]
    in_row = [max(lines[i - i % columns :][:columns]) for i in range(count)]  # align the titles in a row
    for axes, drawn, labels, room_above in zip(grid, shown, legends, in_row, strict=False):
        draw_panel(axes, drawn, frame, labels)
        _name(axes, drawn.panel.title, unit_of(drawn), headline(drawn), labels, room_above)
    if times is not None:
        draw_parts(grid[-1], times, frame)
        _name(grid[-1], PARTS_TITLE, "s", "", legends[-1], in_row[-1])
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
    style: dict[str, Any] = {"va": "top", "parse_math": False}
    figure.text(left, top, shown, fontsize=15, fontweight="bold", color=INK, **style)
    figure.text(left, top - 0.34 / height, "  ·  ".join(facts), fontsize=10, color=MUTED, **style)


def _footer(figure: Any, frame: Frame, constant: str) -> None:
    width, height = figure.get_size_inches()
    notes = [
        "x: steps as in metrics.jsonl, from 0" + (" (-1: the evaluation before step 0)" if frame.limits[0] < 0 else "")
    ]
    if frame.marks:
        notes.append("dotted line: the run was resumed")
    if frame.limits[1] >= 100:
        notes.append("pale: every step, strong: running mean")
    notes += [constant] if constant else []
    said = textwrap.fill("  ·  ".join(notes), int(FOOTER_CHARS_PER_INCH * width))
    figure.text(0.14 / width, 0.1 / height, said, fontsize=9, color=MUTED, va="bottom", parse_math=False)


def _name(axes: Any, title: str, unit: str, value: str, labels: Sequence[str], room_above: int) -> None:
    """Adds title, value and legend above a panel. `room_above`: number of legend lines above the panels in this row."""
    pad = 6 + 15 * room_above
    full = f"{title}, {unit}" if unit else title
    axes.set_title(full, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=pad, parse_math=False)
    if value:
        axes.set_title(value, loc="right", fontsize=10, color=MUTED, pad=pad)
    if labels:
        style: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 1.3, "columnspacing": 1.2}
        style |= {"loc": "lower left", "bbox_to_anchor": (-0.012, 0.985), "borderaxespad": 0.0, "labelcolor": INK}
        axes.legend(ncols=max(1, math.ceil(len(labels) / legend_lines(labels))), **style)


def legend_lines(labels: Sequence[str]) -> int:
    """Returns the number of lines that a legend occupies above a panel."""
    return math.ceil(sum(len(label) + 6 for label in labels) / LEGEND_CHARS) if labels else 0


def _labels(drawn: Drawn) -> list[str]:
    """Returns the legend labels. Empty if the title already names the only curve."""
    labels = [one.label for one in drawn.series]
    if drawn.band:
        return [f"{labels[0]} (band: minimum to maximum)", *labels[1:]]
    return labels if drawn.is_named else []
