"""The pictures of the page: inline SVG, colours by class, so that one style sheet draws them on light and on dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime.observability.report.markup import (
    Markup,
    element,
    joined,
    log_ticks,
    seconds_text,
    short,
    ticks,
    whole_ticks,
)
from slime.observability.report.panels import Drawn
from slime.observability.report.record import OTHER, STEP_PARTS, Curve, StepTimes, running_mean, thinned
from slime.observability.report.scales import (
    MARKERS_UP_TO,
    Frame,
    headline,
    seconds_limit,
    unit_of,
    value_limits,
    written,
)

WIDTH, HEIGHT = 460.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 12.0, 10.0, 24.0
NUM_COLORS = 8
NUM_TICKS_X, NUM_TICKS_Y = 8, 4
PART_COLORS = {part: number for number, part in enumerate((*STEP_PARTS, OTHER))}


@dataclass(frozen=True, slots=True)
class Axes:
    """From steps and values to places in the picture."""

    steps: tuple[float, float]
    values: tuple[float, float]
    is_log: bool = False

    def x(self, step: float) -> float:
        low, high = self.steps
        return LEFT + (step - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = (math.log10(one) for one in self.values) if self.is_log else self.values
        place = (math.log10(value) if self.is_log else value) - low
        return HEIGHT - BOTTOM - place / (high - low) * (HEIGHT - TOP - BOTTOM)

    @property
    def data(self) -> str:
        """What the script needs: limits of the steps, left and right end of the axis, width of the picture."""
        return f"{self.steps[0]:g} {self.steps[1]:g} {LEFT:g} {WIDTH - RIGHT:g} {WIDTH:g}"

    def points(self, curve: Curve) -> str:
        pairs = zip(curve.steps, curve.values, strict=True)
        return " ".join(f"{_place(self.x(step))},{_place(self.y(value))}" for step, value in pairs)


def axes_in(frame: Frame, values: tuple[float, float], *, is_log: bool = False) -> Axes:
    """Axes of a panel over all steps of the run, with a little room beside them."""
    low, high = frame.limits
    free = max(0.03 * (high - low), 0.5)
    return Axes((low - free, high + free), values, is_log)


def panel_figure(drawn: Drawn, frame: Frame) -> Markup:
    """One panel: title, legend, curves."""
    panel, axes = drawn.panel, axes_in(frame, value_limits(drawn), is_log=drawn.scale == "log")
    y_ticks = log_ticks(*axes.values) if axes.is_log else ticks(*axes.values, NUM_TICKS_Y)
    grid = _grid(axes, frame, [(tick, written(tick, drawn)) for tick in y_ticks])
    band = _band(drawn, axes)
    lines = [
        _series(one.curve, one.label, axes, color=i, dashed=one.dashed, drawn=drawn)
        for i, one in enumerate(drawn.series)
    ]
    names = [one.label for one in drawn.series] if drawn.is_named else []
    lasts = [written(one.curve.last, drawn) for one in drawn.series]
    entries = [
        (f"c{i % NUM_COLORS}", name, last, one.dashed)
        for i, (name, last, one) in enumerate(zip(names, lasts, drawn.series, strict=False))
    ]
    said = "; ".join(_said(one.label or panel.title, one.curve, drawn) for one in drawn.series)
    picture = _picture(panel.title, said, axes, joined(grid, band, *lines))
    return _card(panel.title, unit_of(drawn), panel.about, headline(drawn), entries, picture)


def parts_figure(times: StepTimes, frame: Frame) -> Markup:
    """Stacked bars of the parts of a step."""
    wide = 0.74 if len(times.steps) <= MARKERS_UP_TO else 1.0
    half = wide * times.steps_per_bar / 2
    axes = axes_in(frame, (0.0, seconds_limit(times)))
    grid = _grid(axes, frame, [(tick, short(tick)) for tick in ticks(*axes.values, NUM_TICKS_Y)])
    bottom, bars, entries = [0.0] * len(times.steps), [], []
    for part, seconds in times.parts.items():
        color = f"p{PART_COLORS[part]}"
        path = "".join(
            _bar(axes, step, half, low_s, own_s)
            for step, low_s, own_s in zip(times.steps, bottom, seconds, strict=True)
            if own_s > 0
        )
        data = {"data_name": part, "data_x": _numbers(times.steps), "data_y": " ".join(map(short, seconds))}
        bars.append(element("g", element("path", d=path), class_=f"bar series {color}", **data))
        bottom = [low_s + own_s for low_s, own_s in zip(bottom, seconds, strict=True)]
        entries.append((color, part, seconds_text(sum(seconds) / len(seconds)), False))
    about = "What the driver waited for; parts do not contain each other. The legend has the means."
    if times.steps_per_bar > 1:
        about += f" One bar is the mean of {times.steps_per_bar} steps."
    said = "; ".join(f"{name}: mean {value}" for _, name, value, _ in entries)
    title = "Where the time of a step goes"
    return _card(title, "s", about, "", entries, _picture(title, said, axes, joined(grid, *bars)))


def _card(
    title: str, unit: str, about: str, value: str, entries: Sequence[tuple[str, str, str, bool]], picture: Markup
) -> Markup:
    """`entries` of the legend: class of the colour, name, value, dashed."""
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


def _picture(title: str, said: str, axes: Axes, inside: Markup) -> Markup:
    cross = element("line", class_="cross", y1=TOP, y2=HEIGHT - BOTTOM, x1=-9, x2=-9)
    named = f"{title}: {said}"
    return element(
        "svg",
        inside,
        cross,
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        aria_label=named,
        data_axis=axes.data,
        class_="chart",
    )


def _said(name: str, curve: Curve, drawn: Drawn) -> str:
    first, last = written(curve.first, drawn), written(curve.last, drawn)
    least, most = written(min(curve.values), drawn), written(max(curve.values), drawn)
    return f"{name} from {first} to {last}, least {least}, most {most}"


def _grid(axes: Axes, frame: Frame, y_ticks: Sequence[tuple[float, str]]) -> Markup:
    """Lines and numbers of both axes, and where the run was resumed."""
    made: list[Markup] = []
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for value, label in y_ticks:
        y = _place(axes.y(value))
        made.append(element("line", class_="grid", x1=LEFT, x2=right, y1=y, y2=y))
        made.append(element("text", label, x=LEFT - 7, y=_place(axes.y(value) + 3.7), text_anchor="end"))
    for mark in frame.marks:
        x = _place(axes.x(mark))
        made.append(
            element(
                "line",
                element("title", f"resumed with step {mark + 0.5:g}"),
                class_="mark",
                x1=x,
                x2=x,
                y1=TOP,
                y2=bottom,
            )
        )
    made.append(element("line", class_="axis", x1=LEFT, x2=right, y1=bottom, y2=bottom))
    for step in whole_ticks(*frame.limits, NUM_TICKS_X):
        made.append(element("text", f"{step:,}", x=_place(axes.x(step)), y=bottom + 16, text_anchor="middle"))
    made.append(element("text", "step", x=2, y=bottom + 16, class_="what"))
    return joined(*made)


def _series(whole: Curve, label: str, axes: Axes, *, color: int, dashed: bool, drawn: Drawn) -> Markup:
    points, mean = thinned(whole), running_mean(whole)
    pale = "pale" if mean is not None else None
    made = [element("polyline", points=axes.points(points), class_=pale)]
    if mean is not None:
        made.append(element("polyline", points=axes.points(mean)))
    elif len(points.steps) <= MARKERS_UP_TO:
        radius = 2.3 if len(points.steps) > 1 else 4
        made += [
            element("circle", cx=_place(axes.x(s)), cy=_place(axes.y(v)), r=radius)
            for s, v in zip(points.steps, points.values, strict=True)
        ]
    values = " ".join(written(value, drawn).replace(" ", "") for value in points.values)
    return element(
        "g",
        *made,
        class_=f"line series c{color % NUM_COLORS}{' dashed' if dashed else ''}",
        data_name=label or drawn.panel.title,
        data_x=_numbers(points.steps),
        data_y=values,
    )


def _band(drawn: Drawn, axes: Axes) -> Markup | None:
    """The area between the least and the greatest value."""
    if drawn.band is None:
        return None
    least, greatest = (thinned(one) for one in drawn.band)
    back = Curve(list(reversed(least.steps)), list(reversed(least.values)))
    return element("polygon", points=f"{axes.points(greatest)} {axes.points(back)}", class_="band c0")


def _bar(axes: Axes, step: float, half: float, low_s: float, own_s: float) -> str:
    left, right = axes.x(step - half), axes.x(step + half)
    top, bottom = axes.y(low_s + own_s), axes.y(low_s)
    return f"M{_place(left)} {_place(bottom)}V{_place(top)}H{_place(right)}V{_place(bottom)}Z"


def _place(value: float) -> str:
    """A coordinate: a tenth of a pixel is finer than any screen."""
    return f"{value:.1f}".removesuffix(".0")


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" if abs(value) < 1e5 else f"{value:.1f}".removesuffix(".0") for value in values)
