"""Commands on a run folder, even while the run is active: `slime report`, `slime samples`, `slime trace` read it, and
`slime fleet` also tells a run which engines to drain.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.errors import DataError
from slime.core.text import one_line, visible
from slime.observability.samples import FILE_NAME, PICKS, ShownSample, heading, number, read_samples, when, where

if TYPE_CHECKING:
    from rich.console import Console

    from slime.fleet.supervisor import FleetFiles


def _require_run(folder: Path) -> None:
    """Raises `DataError` if the folder is not a run folder."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; pass the folder of a run")
    if any((folder / name).exists() for name in _FILES_OF_RUN):
        return
    runs = sorted(path.parent.name for path in folder.glob("*/run.json"))
    do = f"pass one of the runs in it: {', '.join(runs[:5])}" if runs else "pass the folder of a run (--run-dir)"
    raise DataError(f"{folder} is not the folder of a run (no run.json and no metrics.jsonl); {do}")


_FILES_OF_RUN = ("run.json", "metrics.jsonl", "samples.jsonl", "traces")


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the folder of a run")


def run_report(options: argparse.Namespace) -> int:
    """Writes the report of a run and prints its text. Raises `DataError` for a folder without steps."""
    _require_run(options.run_dir)
    from slime.observability.report import summary_text, write_report

    made = write_report(options.run_dir)
    print(summary_text(made.summary, made.title))
    for name, path in (("page", made.page), ("picture", made.picture), ("text", made.text)):
        print(f"{name}: {path}")
    return 0


DEFAULT_NUM = 6
METADATA_CHARS = 200


def add_samples_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--step",
        type=int,
        help="samples of this step, counted from 0; -1: the evaluation before step 0 (default: the last)",
    )
    parser.add_argument("--best", action="store_true", help="only the best of each step")
    parser.add_argument("--worst", action="store_true", help="only the worst of each step")
    parser.add_argument("--eval", action="store_true", help="evaluation samples (default: training samples, if any)")
    parser.add_argument("--dataset", metavar="NAME", help="evaluation samples of this dataset")
    parser.add_argument(
        "--full", action="store_true", help=f"metadata in full, not only {METADATA_CHARS} characters of each entry"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line, as in samples.jsonl")
    parser.add_argument("-n", type=int, metavar="N", help=f"at most N, the newest (default: {DEFAULT_NUM})")


def run_samples(options: argparse.Namespace) -> int:
    """Prints the chosen samples. Raises `DataError` if there are none."""
    _require_run(options.run_dir)
    path = options.run_dir / FILE_NAME
    samples = read_samples(path)
    if not samples:
        raise DataError(
            f"{options.run_dir} has no samples ({FILE_NAME}): no step has finished yet, or the run had --log-samples 0"
        )
    chosen = choose(samples, options)
    if not chosen:
        raise DataError(f"{path} has no matching samples, only {_what_there_is(samples)}; change the flags")
    num = options.n if options.n is not None else len(chosen) if options.step is not None else DEFAULT_NUM
    chosen = chosen[len(chosen) - num :] if 0 <= num < len(chosen) else chosen
    try:
        if options.json:
            print("\n".join(json.dumps(sample.to_dict()) for sample in chosen), flush=True)
        else:
            from rich.console import Console

            _show(chosen, Console(highlight=False, soft_wrap=True), full=options.full)
    except BrokenPipeError:  # the reader closed the pipe (`| head`); otherwise Python would report it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def choose(samples: Sequence[ShownSample], options: argparse.Namespace) -> list[ShownSample]:
    """Returns the samples selected by the flags, by step; within a step the best, then the worst, then others."""
    evaluations = options.eval or options.dataset is not None or all(s.kind == "eval" for s in samples)
    picks = [name for name in PICKS if getattr(options, name, False)] or PICKS
    chosen = [
        sample
        for sample in samples
        if (sample.kind == "eval") == evaluations
        and sample.picked in picks
        and options.step in (None, sample.step)
        and options.dataset in (None, sample.dataset)
    ]
    return sorted(chosen, key=lambda s: (s.step, s.dataset or "", PICKS.index(s.picked)))


def _what_there_is(samples: Sequence[ShownSample]) -> str:
    steps: dict[str, list[ShownSample]] = {}
    for sample in samples:
        steps.setdefault(where(sample), []).append(sample)
    ends = {name: (min(seen, key=_step), max(seen, key=_step)) for name, seen in sorted(steps.items())}
    return "; ".join(f"{name}, {when(first)} to {when(last)}" for name, (first, last) in ends.items())


def _step(sample: ShownSample) -> int:
    return sample.step


def _show(samples: Sequence[ShownSample], console: Console, *, full: bool) -> None:
    """Prints samples. Uses colour only on a terminal; escapes control characters."""
    from rich.text import Text

    for position, sample in enumerate(samples):
        if position:
            console.print()
        console.print(Text(visible(heading(sample)), style="bold"))
        if sample.label is not None:
            _part(console, "label", sample.label, "yellow")
        _part(console, "prompt", sample.prompt, "dim")
        _part(console, "response", sample.response, "green" if sample.picked == "best" else "")
        if sample.more:
            _part(console, "facts", ", ".join(_fact(name, value) for name, value in sample.more.items()), "dim")
        if sample.metadata:
            _part(console, "metadata", "\n".join(_entry(*entry, full=full) for entry in sample.metadata.items()), "dim")


def _entry(name: str, value: object, *, full: bool) -> str:
    """Formats a metadata entry: shortened to one line, or completely (`full`).

    A complete mapping gets one line or more per key, so that text in it keeps its line breaks.
    """
    if full and isinstance(value, dict) and value:
        return "\n".join(_entry(f"{name}.{key}", one, full=True) for key, one in value.items())
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{name}: {text if full else one_line(text, METADATA_CHARS)}"


def _fact(name: str, value: object) -> str:
    numbers = ", ".join(f"{k} {number(v)}" for k, v in value.items()) if isinstance(value, dict) else value
    return f"{name} {numbers}"


def _part(console: Console, name: str, text: str, style: str) -> None:
    from rich.text import Text

    first, *others = visible(text).split("\n")
    body = "\n".join([f"  {name:>8}  {first}", *(f"            {line}" for line in others)])
    console.print(Text(body, style=style))


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", type=Path, help="default: trace.json in the run folder")


def run_trace(options: argparse.Namespace) -> int:
    """Merges the traces of all launches of a run into one file. Raises `DataError` for a folder without traces."""
    _require_run(options.run_dir)
    from slime.observability.spans import read_trace

    parts = sorted((options.run_dir / "traces").glob("*.json"))
    if not parts:
        raise DataError(f"{options.run_dir} has no traces/*.json; pass the folder of a run")
    events = [event for part in parts for event in read_trace(part)]
    out = options.out or options.run_dir / "trace.json"
    out.write_text(json.dumps({"traceEvents": events}))
    print(f"{len(events)} events from {len(parts)} trace files in {out}; open it at https://ui.perfetto.dev")
    return 0


ACTIONS = ("drain", "add")


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "action",
        nargs="?",
        choices=ACTIONS,
        help="drain: stop engines, whose requests move to others; add: start drained engines again; default: list",
    )
    parser.add_argument("which", nargs="*", metavar="ENGINE|HOST", help="numbers of engines, or addresses of hosts")
    parser.add_argument("--wait-s", type=float, default=60.0, help="how long to wait for the run to follow")


def run_fleet(options: argparse.Namespace) -> int:
    """Lists a run's engines, or drains engines or takes them back and waits until the run has done so.

    Returns 1 if the run refuses or does not follow in time. Raises `DataError` for unknown engines.
    """
    _require_run(options.run_dir)
    from slime.fleet.supervisor import FleetFiles

    files = FleetFiles(options.run_dir)
    engines = files.engines()
    if options.action is None:
        _list_engines(engines)
        return 0
    chosen = _chosen_engines(engines, options.which)
    before, drains = files.drained(), options.action == "drain"
    names = frozenset(options.which)
    if not drains:  # an engine of a drained host is taken back alone, so the host's other engines are named instead
        rest = _named(engines, before) - chosen
        files.order(map(str, rest))
    else:
        files.order(before | names)
    left = _wait_for_fleet(files, chosen, drains=drains, limit_s=options.wait_s)
    if drains and any(engine["refuses"] for engine in left):  # a refused order must not come true later
        refused = {engine["engine"] for engine in left if engine["refuses"]}
        files.order(before | set(map(str, chosen - refused)))
    return int(bool(left))


def _chosen_engines(engines: Sequence[dict[str, Any]], which: Sequence[str]) -> set[int]:
    known = {str(e["engine"]) for e in engines} | {e["host"] for e in engines if e["host"]}
    if not which or (unknown := set(which) - known):
        missing = f"{', '.join(sorted(unknown))} is not among them" if which else "name at least one"
        raise DataError(f"the engines and hosts of this run are {', '.join(sorted(known))}; {missing}")
    return _named(engines, which)


def _named(engines: Sequence[dict[str, Any]], names: Container[str]) -> set[int]:
    from slime.fleet.supervisor import is_named

    return {e["engine"] for e in engines if is_named(names, e["engine"], e["host"])}


def _wait_for_fleet(files: FleetFiles, chosen: set[int], *, drains: bool, limit_s: float) -> list[dict[str, Any]]:
    """Returns the chosen engines that the run has not drained or started after the time limit, or refuses to drain."""
    deadline = time.monotonic() + limit_s
    while True:
        engines = [engine for engine in files.engines() if engine["engine"] in chosen]
        left = [engine for engine in engines if _is_drained(engine) != drains]
        refused = [engine["reason"] for engine in left if engine["refuses"]]
        if not left or len(refused) == len(left) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    _list_engines(engines)
    if left:
        late = f"the run has not followed within {limit_s:.0f} s, but will; it may be in a weight sync"
        print("; ".join(refused) or late)
    return left


def _is_drained(engine: Mapping[str, Any]) -> bool:
    """Returns whether an engine is drained, or has been taken back and not begun to start."""
    from slime.fleet.supervisor import DRAINED

    return engine["state"] == "drained" or (engine["state"] == "dead" and engine["reason"] == DRAINED)


def _list_engines(engines: Sequence[dict[str, Any]]) -> None:
    for engine in engines:
        version = f" at version {engine['version']}" if engine["version"] is not None else ""
        where = f" on {engine['host']}" if engine["host"] else ""
        reason = f" ({one_line(engine['reason'], METADATA_CHARS)})" if engine["reason"] else ""
        print(f"engine {engine['engine']} of {engine['model']}{where}: {engine['state']}{version}{reason}")
