"""The tables of the page: samples, settings, starts. What they show may be hostile or very long."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from slime.core.text import shorten
from slime.observability.report.markup import Markup, element
from slime.observability.report.numbers import when
from slime.observability.report.record import RunKind, RunRecord, given_settings, was_given
from slime.observability.samples import PICKS, ShownSample, number, where

MAX_SAMPLES, TEXT_CHARS = 48, 1500
SHOWN_SAMPLES = 12
"""Those of the latest steps stand open, the others in a drawer."""
VALUE_CHARS = 400
NUM_COMMIT_CHARS = 12
COLUMNS = ("of", "reward", "label", "prompt", "response")
TARGET = "target"
"""The column of a response that the data gave."""


def chosen_samples(samples: Sequence[ShownSample], limit: int = MAX_SAMPLES) -> list[ShownSample]:
    """At most `limit`, the latest step first: of the last step, of the first, and of steps evenly between."""
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


def samples_section(record: RunRecord) -> Markup | None:
    """What the model said; None if no sample was kept."""
    if not record.samples:
        return None
    chosen = chosen_samples(record.samples)
    shown, rest = chosen[:SHOWN_SAMPLES], chosen[SHOWN_SAMPLES:]
    about = f"{len(chosen)} of the {len(record.samples):,} in samples.jsonl, the latest step first: "
    if record.kind is RunKind.SFT:
        about += "some at random of what was trained. The target is what the data says, not the model."
    else:
        about += "the best, the worst and some at random of each step and evaluation."
    columns = _columns(record)
    table = _samples_table(rest, columns) if rest else None
    drawer = element("details", element("summary", f"{len(rest)} of earlier steps"), table) if rest else None
    return element(
        "section",
        element("h2", "Samples"),
        element("p", about, class_="about"),
        _samples_table(shown, columns),
        drawer,
        id="samples",
    )


def _columns(record: RunRecord) -> Sequence[str]:
    """Fine-tuning gives no reward and shows targets; not every dataset has labels."""
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
    of = "trained" if TARGET in names else where(one)
    detail = shorten(" · ".join(facts), 300)
    cells = {
        "of": element("td", f"{of}, step {one.step}", element("br"), element("span", detail, class_="muted")),
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
    """What was asked for, and all the rest in a drawer."""
    every = list(given_settings(record.settings))
    if not every:
        return None
    given = [one for one in every if was_given(one[2])]
    rest = [one for one in every if not was_given(one[2])]
    about = "Every setting of the latest start (args.json): first what was given, then what was a default or derived."
    return element(
        "section",
        element("h2", "Settings"),
        element("p", about, class_="about"),
        _settings_table(given) if given else None,
        element("details", element("summary", f"{len(rest)} defaults and derived settings"), _settings_table(rest)),
        id="settings",
    )


def _settings_table(settings: Sequence[tuple[str, object, str]]) -> Markup:
    head = element("tr", *(element("th", name, scope="col") for name in ("setting", "value", "from")))
    rows = [
        element(
            "tr",
            element("td", element("code", name)),
            element("td", element("code", shorten("" if value is None else str(value), VALUE_CHARS))),
            element("td", shorten(origin, 200), class_="muted"),
        )
        for name, value, origin in settings
    ]
    return element("div", element("table", element("thead", head), element("tbody", *rows)), class_="table")


def starts_section(record: RunRecord) -> Markup | None:
    """When, where and of what the run was started; the versions of the latest start."""
    if not record.starts:
        return None
    names = ("start", "first step", "commit", "host", "command")
    head = element("tr", *(element("th", name, scope="col") for name in names))
    rows = []
    for number_of, start in enumerate(record.starts):
        facts = start.facts
        host = facts.get("host") if isinstance(facts.get("host"), dict) else {}
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
                element("td", _host(host or {})),
                element("td", element("pre", shorten(line, 3000), tabindex="0")),
            )
        )
    table = element("div", element("table", element("thead", head), element("tbody", *rows)), class_="table")
    return element("section", element("h2", "Starts"), table, _versions(record), id="starts")


def _how(number_of: int, step: str, facts: Mapping[str, object]) -> str:
    if number_of == 0:
        return "first start"
    how = "ended before a step" if step == "none" else "resumed"
    restart = facts.get("restart")
    return f"{how} by itself, after {restart.get('because')}" if isinstance(restart, dict) else how


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
    return element("p", f"Versions of the latest start: {told}.", class_="muted")
