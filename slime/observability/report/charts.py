"""The curves of the page: a card for each panel, with its title, legend and SVG image, in the colours of page.css.

matplotlib's SVG is adapted to the page: the page's policy forbids `style`, ids must be unique in a page, and a dark
page has other colours. `data-*` attributes of each curve have the values for page.js to show under the pointer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from slime.observability.report.figure import (
    BOTTOM,
    COLORS,
    GRID,
    HEIGHT,
    LEFT,
    MARK,
    MUTED,
    OTHER_COLOR,
    PARTS_TITLE,
    RIGHT,
    TOP,
    WIDTH,
    Frame,
    draw_panel,
    draw_parts,
    headline,
    part_color,
    svg_of,
    unit_of,
    written,
)
from slime.observability.report.markup import Markup, element, seconds_text, short
from slime.observability.report.panels import Drawn
from slime.observability.report.record import Curve, StepTimes, thinned

CLASSES = {color: f"c{i}" for i, color in enumerate((*COLORS, OTHER_COLOR))}
VARIABLES = CLASSES | {MUTED: "muted", GRID: "grid", MARK: "mark"}
"""Colour -> its variable in page.css."""


def panel_figure(drawn: Drawn, frame: Frame) -> Markup:
    """One panel: title, legend, curves."""
    title = drawn.panel.title
    data = {}
    entries = []
    for i, one in enumerate(drawn.series):
        color, points = f"c{i % len(COLORS)}", thinned(one.curve)
        values = " ".join(written(value, drawn).replace(" ", "") for value in points.values)
        data[f"series-{i}"] = _data(color, one.label or title, points.steps, values)
        if drawn.is_named:
            entries.append((color, one.label, written(one.curve.last, drawn), one.dashed))
    said = "; ".join(_said(one.label or title, one.curve, drawn) for one in drawn.series)
    svg, steps = svg_of(lambda axes: draw_panel(axes, drawn, frame))
    picture = _picture(svg, steps, f"{title}: {said}", data)
    return _card(title, unit_of(drawn), drawn.panel.about, headline(drawn), entries, picture)


def parts_figure(times: StepTimes, frame: Frame) -> Markup:
    """Stacked bars of the parts of a step."""
    data, entries = {}, []
    for i, (part, seconds) in enumerate(times.parts.items()):
        color = f"p {CLASSES[part_color(part)]}"
        data[f"series-{i}"] = _data(color, part, times.steps, " ".join(map(short, seconds)))
        entries.append((color, part, seconds_text(sum(seconds) / len(seconds)), False))
    about = "What the driver waited for; parts do not contain each other. The legend has the means."
    if times.steps_per_bar > 1:
        about += f" One bar is the mean of {times.steps_per_bar} steps."
    said = "; ".join(f"{name}: mean {value}" for _, name, value, _ in entries)
    svg, steps = svg_of(lambda axes: draw_parts(axes, times, frame))
    return _card(PARTS_TITLE, "s", about, "", entries, _picture(svg, steps, f"{PARTS_TITLE}: {said}", data))


def _card(
    title: str, unit: str, about: str, value: str, entries: Sequence[tuple[str, str, str, bool]], picture: Markup
) -> Markup:
    """`entries`: the legend, as (class of the colour, name, value, dashed)."""
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
    """The attributes of a curve's group, for the script."""
    numbers = " ".join(f"{step:g}" if abs(step) < 1e5 else f"{step:.1f}".removesuffix(".0") for step in steps)
    return {"class_": f"series {color}", "data_name": name, "data_x": numbers, "data_y": values}


def _said(name: str, curve: Curve, drawn: Drawn) -> str:
    first, last = written(curve.first, drawn), written(curve.last, drawn)
    least, most = written(min(curve.values), drawn), written(max(curve.values), drawn)
    return f"{name} from {first} to {last}, least {least}, most {most}"


def _picture(svg: str, steps: tuple[float, float], said: str, data: Mapping[str, Mapping[str, str]]) -> Markup:
    """`data`: id of a group in the image -> its attributes on the page."""
    inside = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    inside = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", inside, flags=re.S)
    inside = re.sub(r'style="([^"]*)"', lambda found: _attributes(found[1]), inside)
    inside = re.sub(r'<g id="(resumed [^"]*)">', r"<g><title>\1</title>", inside)
    inside = re.sub(r'<g id="([^"]*)"', lambda found: _opened(data.get(found[1], {})), inside)
    inside = re.sub(r'="[^"]*"', _rounded, inside)
    inside = re.sub(r"\s+", " ", inside)
    for color, name in VARIABLES.items():
        inside = inside.replace(color, f"var(--{name})")
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
    """Turns a style into attributes, without the font, which the page sets."""
    pairs = [one.split(":", 1) for one in style.split(";") if ":" in one]
    return " ".join(f'{key.strip()}="{value.strip()}"' for key, value in pairs if "font" not in key)


def _rounded(value: re.Match[str]) -> str:
    """Rounds an attribute to one decimal: a tenth of a unit is finer than any screen."""
    return re.sub(r"(\.\d)\d{2,}", r"\1", value[0])


def _opened(attributes: Mapping[str, str]) -> str:
    return element("g", **attributes).removesuffix("></g>")
