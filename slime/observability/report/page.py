"""The page of a run: `report.html`, one file that needs no server and no network.

Its style and its script stand in it; a policy lets a browser run these two and nothing else, so that no text of a model
can become a program even if it got through the escaping of `markup`. Without the script only the values under the
pointer are missing.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

from slime.observability.report.charts import panel_figure, parts_figure
from slime.observability.report.markup import Markup, element, joined
from slime.observability.report.numbers import short, when
from slime.observability.report.panels import TIME, Drawn
from slime.observability.report.parts import step_times
from slime.observability.report.record import RunKind, RunRecord
from slime.observability.report.scales import frame_of, in_words
from slime.observability.report.summary import RunSummary, before_and_after, finding_text
from slime.observability.report.tables import samples_section, settings_section, starts_section
from slime.observability.report.timeline import GENERATION, timeline_figure, timelines

STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "page.js"))
DURATIONS = ((3600.0, "h"), (60.0, "min"), (0.0, "s"))


def page(record: RunRecord, panels: Sequence[Drawn], summary: RunSummary, title: str) -> str:
    """The whole document."""
    sections = [
        ("curves", "Curves", _curves(record, panels)),
        ("timeline", "Timeline", _timeline(record)),
        ("samples", "Samples", samples_section(record)),
        ("settings", "Settings", settings_section(record)),
        ("starts", "Starts", starts_section(record)),
    ]
    present = [(name, label, content) for name, label, content in sections if content is not None]
    links = element("nav", *(element("a", label, href=f"#{name}") for name, label, _ in present), aria_label="sections")
    header = element("header", element("h1", title), element("p", _subtitle(record, summary), class_="muted"), links)
    main = element("main", _tiles(summary), _warnings(summary), *(content for _, _, content in present))
    note = f"Made by slime from {record.path.name}/metrics.jsonl, {when(time.time())}."
    style, script = Markup(STYLE.read_text()), Markup(SCRIPT.read_text())
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", style),
    )
    body = element("body", header, main, element("footer", note), element("script", script))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _policy(style: str, script: str) -> str:
    """What a browser may load and run: the style and the script by their hashes."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; base-uri 'none'; "
        "form-action 'none'"
    )


def _subtitle(record: RunRecord, summary: RunSummary) -> str:
    times = [row["time"] for row in record.rows if "time" in row]
    parts = [record.kind.value]
    if times:
        parts += [f"first step logged {when(min(times))}", f"{_duration(summary.wall_s)} from the first to the last"]
    if len(record.starts) > 1:
        parts.append(f"{len(record.starts)} starts")
    return "  ·  ".join(parts)


def _duration(seconds: float) -> str:
    size, unit = next((size, unit) for size, unit in DURATIONS if seconds >= size)
    return f"{seconds / (size or 1):.3g} {unit}"


def _tiles(summary: RunSummary) -> Markup:
    """The few numbers that tell how the run went."""
    changes = summary.kind is not RunKind.EVALUATION
    tiles = [
        (name, f"{short(before)} → {short(after)}" if changes else short(after), f"{after - before:+.3g}" * changes)
        for name, (before, after) in list(before_and_after(summary).items())[:4]
    ]
    if changes:
        tiles.append(("steps", f"{summary.num_rollouts:,}", ""))
    if summary.step_s is not None:
        tiles.append(("time per step", f"{short(summary.step_s)} s", "mean, without evaluation"))
    for key, value in summary.telling_mismatches.items():
        fresh = "fresh " if key.startswith("probe/") else ""
        tiles.append((f"largest mismatch of a {fresh}token", f"{short(value)}", "nats"))
    made = [
        element("div", element("dt", name), element("dd", value, " ", element("small", more)), class_="tile")
        for name, value, more in tiles
    ]
    return element("dl", *made, class_="tiles")


def _warnings(summary: RunSummary) -> Markup | None:
    if not summary.findings:
        return None
    items = [element("li", finding_text(one)) for one in summary.findings]
    return element("ul", *items, class_="warnings", aria_label="warnings")


def _curves(record: RunRecord, panels: Sequence[Drawn]) -> Markup | None:
    frame, times = frame_of(record), step_times(record.rows)
    shown = [drawn for drawn in panels if not drawn.in_words]
    cards = [panel_figure(drawn, frame) for drawn in shown if drawn.panel.section != TIME]
    cards += [parts_figure(times, frame)] if times is not None else []
    cards += [panel_figure(drawn, frame) for drawn in shown if drawn.panel.section == TIME]
    if not cards:
        return None
    notes = ["Steps are counted from 0, as in metrics.jsonl."]
    if frame.limits[0] < 0:
        notes.append("An evaluation carries the step that it follows; -1 is before the first.")
    if frame.marks:
        notes.append("Dotted lines: the run was resumed; of a step that was done again the last time is drawn.")
    if frame.limits[1] - frame.limits[0] >= 100:
        notes.append("Pale: every step; strong: the running mean.")
    if constant := in_words(panels):
        notes.append(f"{constant[0].upper()}{constant[1:]}.")
    return element(
        "section",
        element("h2", "Curves"),
        element("p", " ".join(notes), class_="about"),
        element("div", *cards, class_="cards"),
        id="curves",
    )


def _timeline(record: RunRecord) -> Markup | None:
    found = timelines(record)
    if not found:
        return None
    figures = [
        joined(
            element("h3", f"Step {one.step}, {'a typical one' if i == 0 else 'the slowest'}: {short(one.seconds)} s"),
            element("div", timeline_figure(one), class_="table padded"),
        )
        for i, one in enumerate(found)
    ]
    about = "What the driver did between the end of the step before and the end of the step, from traces/."
    if any(bar.name == GENERATION for one in found for bar in one.bars):
        about += " The row “generation” is what the rollout did meanwhile, for this step or for the next one."
    return element(
        "section", element("h2", "Timeline of a step"), element("p", about, class_="about"), *figures, id="timeline"
    )
