"""The HTML report, `report.html`: a single file that needs neither a server nor a network.

Stylesheet and script are inlined. A content security policy allows only these two, so text from a model cannot execute
even if it gets past the escaping in `markup`. The script just shows the values under the pointer.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core.files import replace_bytes
from slime.core.text import shorten
from slime.observability.progress import duration
from slime.observability.report.figure import frame_of, in_words, panel_figure, parts_figure, write_picture
from slime.observability.report.markup import Markup, element, joined, short, when
from slime.observability.report.panels import TIME, Drawn, drawn_panels
from slime.observability.report.record import RunKind, RunRecord, given_settings, read_run, step_times, was_given
from slime.observability.report.summary import RunSummary, before_and_after, finding_text, report_markdown, summary_of
from slime.observability.report.timeline import GENERATION, timeline_figure, timelines
from slime.observability.samples import PICKS, ShownSample, number, where
from slime.observability.samples import when as time_of

MAX_SAMPLES, TEXT_CHARS = 48, 1500
SHOWN_SAMPLES = 12
"""Number of samples shown initially, from the latest steps. The others are in a collapsed section."""
VALUE_CHARS = 400
NUM_COMMIT_CHARS = 12
COLUMNS = ("of", "reward", "label", "prompt", "response")
TARGET = "target"
"""Column for a response that comes from the data."""


def chosen_samples(samples: Sequence[ShownSample], limit: int = MAX_SAMPLES) -> list[ShownSample]:
    """Returns up to `limit` samples from the last, the first and evenly spaced intermediate steps, latest first."""
    steps: dict[tuple[int, str, str], list[ShownSample]] = {}
    for one in samples:
        steps.setdefault((one.step, one.kind, one.dataset or ""), []).append(one)
    latest_first = sorted(steps, reverse=True)
    per_step = max(map(len, steps.values()), default=1)
    wanted = max(2, limit // per_step)
    if len(latest_first) > wanted:
        last = len(latest_first) - 1
        latest_first = [latest_first[round(i * last / (wanted - 1))] for i in range(wanted)]
    picked = [one for key in latest_first for one in sorted(steps[key], key=lambda s: PICKS.index(s.picked))]
    return picked[:limit]


def _section(title: str, about: str | None, *children: object) -> Markup:
    note = element("p", about, class_="about") if about else None
    return element("section", element("h2", title), note, *children, id=title.split()[0].lower())


def _table(names: Sequence[str], rows: Iterable[Markup]) -> Markup:
    head = element("tr", *(element("th", name, scope="col") for name in names))
    return element("div", element("table", element("thead", head), element("tbody", *rows)), class_="table")


def samples_section(record: RunRecord) -> Markup | None:
    if not record.samples:
        return None
    chosen = chosen_samples(record.samples)
    shown, rest = chosen[:SHOWN_SAMPLES], chosen[SHOWN_SAMPLES:]
    about = f"{len(chosen)} of the {len(record.samples):,} in samples.jsonl, the latest step first: "
    if record.kind is RunKind.SFT:
        about += "a random selection of what was trained. The target comes from the data, not from the model."
    else:
        about += "the best, the worst and some random ones of each step and evaluation."
    columns = _columns(record)
    table = _samples_table(rest, columns) if rest else None
    drawer = element("details", element("summary", f"{len(rest)} of earlier steps"), table) if rest else None
    return _section("Samples", about, _samples_table(shown, columns), drawer)


def _columns(record: RunRecord) -> Sequence[str]:
    """Returns the table columns. Fine-tuning has targets instead of rewards, and not every dataset has labels."""
    columns = ("of", "label", "prompt", TARGET) if record.kind is RunKind.SFT else COLUMNS
    has_labels = any(one.label for one in record.samples)
    return [name for name in columns if name != "label" or has_labels]


def _samples_table(samples: Sequence[ShownSample], names: Sequence[str]) -> Markup:
    head = element(
        "tr", *(element("th", name, scope="col", class_="number" if name == "reward" else None) for name in names)
    )
    widths = element("colgroup", *(element("col", class_=name) for name in names))
    body = element("tbody", *(_sample_row(one, names) for one in samples))
    table = element("table", widths, element("thead", head), body, class_="samples")
    return element("div", table, class_="table", tabindex="0", role="region", aria_label="samples")


def _sample_row(one: ShownSample, names: Sequence[str]) -> Markup:
    tokens = f"{one.response_length:,} tokens, {one.status}"
    facts = [one.picked, tokens]
    if one.weight_version is not None:
        facts.append(f"weights {one.weight_version}")
    facts += [f"{name.replace('_', ' ')} {value}" for name, value in list(one.more.items())[:6]]
    of = "training data" if TARGET in names else where(one)
    detail = shorten(" · ".join(facts), 300)
    cells = {
        "of": element("td", f"{of}, {time_of(one)}", element("br"), element("span", detail, class_="muted")),
        "reward": element("td", number(one.reward), class_="number"),
        "label": element("td", element("code", shorten(one.label or "", 200))),
        "prompt": element("td", _text(one.prompt)),
        "response": element("td", _text(one.response)),
        TARGET: element("td", _text(one.response)),
    }
    return element("tr", *(cells[name] for name in names))


def _text(value: str) -> Markup:
    return element("pre", shorten(value, TEXT_CHARS), dir="auto", tabindex="0") if value else Markup("")


def settings_section(record: RunRecord) -> Markup | None:
    """Returns the settings given by the user, and all others in a collapsed section."""
    every = list(given_settings(record.settings))
    if not every:
        return None
    given = [one for one in every if was_given(one[2])]
    rest = [one for one in every if not was_given(one[2])]
    about = (
        "All settings of the latest launch (args.json): first those set by the user, then defaults and derived ones."
    )
    drawer = element("details", element("summary", f"{len(rest)} defaults and derived settings"), _settings_table(rest))
    return _section("Settings", about, _settings_table(given) if given else None, drawer)


def _settings_table(settings: Sequence[tuple[str, object, str]]) -> Markup:
    rows = [
        element(
            "tr",
            element("td", element("code", name)),
            element("td", element("code", shorten("" if value is None else str(value), VALUE_CHARS))),
            element("td", shorten(origin, 200), class_="muted"),
        )
        for name, value, origin in settings
    ]
    return _table(("setting", "value", "from"), rows)


def starts_section(record: RunRecord) -> Markup | None:
    """Returns the time, host, commit and command of each launch, and the versions of the latest one."""
    if not record.starts:
        return None
    rows = []
    for number_of, start in enumerate(record.starts):
        facts = start.facts
        host: Any = facts.get("host") if isinstance(facts.get("host"), dict) else {}
        command = facts.get("command")
        line = shlex.join(map(str, command)) if isinstance(command, list) else str(command or "")
        step = "none" if start.step is None else f"{start.step:,}"
        began = when(start.time_s) if start.time_s is not None else str(facts.get("time") or "")
        rows.append(
            element(
                "tr",
                element("td", began, element("br"), element("span", _how(number_of, step, facts), class_="muted")),
                element("td", step, class_="nowrap"),
                element("td", element("code", str(facts.get("commit") or "")[:NUM_COMMIT_CHARS])),
                element("td", _host(host)),
                element("td", element("pre", shorten(line, 3000), tabindex="0")),
            )
        )
    table = _table(("start", "first step", "commit", "host", "command"), rows)
    return _section("Starts", None, table, _versions(record))


def _how(number_of: int, step: str, facts: Mapping[str, object]) -> str:
    if number_of == 0:
        return "first start"
    how = {"none": "ended before a step", "0": "started at step 0"}.get(step, "resumed")
    restart = facts.get("restart")
    return f"{how} automatically after {restart.get('because')}" if isinstance(restart, dict) else how


def _host(host: dict[str, object]) -> str:
    memory = host.get("memory_bytes")
    parts = [str(host.get("name") or "")]
    parts += [
        f"{host[key]} {label}" for key, label in (("num_usable_cpus", "cores"), ("num_gpus", "GPUs")) if host.get(key)
    ]
    if isinstance(memory, int):
        parts.append(f"{memory / 2**30:.0f} GiB")
    return ", ".join(part for part in parts if part)


def _versions(record: RunRecord) -> Markup | None:
    versions = record.starts[-1].facts.get("versions")
    if not isinstance(versions, dict):
        return None
    told = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return element("p", f"Versions of the latest launch: {told}.", class_="muted")


STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "page.js"))


def page(record: RunRecord, panels: Sequence[Drawn], summary: RunSummary, title: str) -> str:
    sections = {
        "Curves": _curves(record, panels),
        "Timeline": _timeline(record),
        "Samples": samples_section(record),
        "Settings": settings_section(record),
        "Starts": starts_section(record),
    }
    anchors = [element("a", name, href=f"#{name.lower()}") for name, content in sections.items() if content is not None]
    links = element("nav", *anchors, aria_label="sections")
    header = element("header", element("h1", title), element("p", _subtitle(record, summary), class_="muted"), links)
    main = element("main", _tiles(summary), _warnings(summary), *sections.values())
    note = f"Generated by slime from {record.path.name}/metrics.jsonl, {when(time.time())}."
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
    """Returns a content security policy that only allows this style and script, by their hashes."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; base-uri 'none'; "
        "form-action 'none'"
    )


def _subtitle(record: RunRecord, summary: RunSummary) -> str:
    times = [row["time"] for row in record.rows if "time" in row]
    parts = [record.kind.value]
    if times:
        parts += [f"first step logged {when(min(times))}", f"{duration(summary.wall_s)} from the first to the last"]
    if len(record.starts) > 1:
        parts.append(f"{len(record.starts)} starts")
    return "  ·  ".join(parts)


def _tiles(summary: RunSummary) -> Markup:
    changes = summary.kind is not RunKind.EVALUATION
    tiles = [
        (name, f"{short(before)} → {short(after)}", f"{after - before:+.3g}")
        if changes and name not in summary.once
        else (name, short(after), "measured once" * changes)
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
        notes.append("An evaluation is at the step that it follows; the one before step 0 is at -1.")
    if frame.marks:
        notes.append("Dotted lines mark where the run was resumed. Only the last repetition of a step is drawn.")
    if frame.limits[1] - frame.limits[0] >= 100:
        notes.append("Pale lines show every step, strong lines the running mean.")
    if constant := in_words(panels):
        notes.append(f"{constant[0].upper()}{constant[1:]}.")
    return _section("Curves", " ".join(notes), element("div", *cards, class_="cards"))


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
    about = "What the driver did between the end of the previous step and the end of this step (from traces/)."
    if any(bar.name == GENERATION for one in found for bar in one.bars):
        about += " The row “generation” shows concurrent rollout work, for this step or the next one."
    return _section("Timeline of a step", about, *figures)


@dataclass(frozen=True, slots=True)
class Report:
    title: str
    summary: RunSummary
    text: Path
    """Markdown."""
    page: Path
    """HTML, one file."""
    picture: Path
    """PNG."""

    @property
    def files(self) -> tuple[Path, ...]:
        return self.picture, self.text, self.page


def write_report(run_dir: Path, out_dir: Path | None = None, *, title: str | None = None) -> Report:
    """Creates the report for a run folder. The run may be running, finished or crashed.

    `out_dir`: by default, the run folder. `title`: by default, model, data and method. Raises `DataError` if no step
    was logged.
    """
    record = read_run(run_dir)
    title, panels, summary = title or record.title, drawn_panels(record), summary_of(record)
    out_dir = out_dir or run_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    report = Report(title, summary, *(out_dir / f"report.{suffix}" for suffix in ("md", "html", "png")))
    for path, text in (
        (report.text, report_markdown(record, summary, title)),
        (report.page, page(record, panels, summary, title)),
    ):
        replace_bytes(path, text.encode(errors="replace"), durable=False)  # a lone surrogate becomes `?`
    write_picture(record, panels, report.picture, title)
    return report
