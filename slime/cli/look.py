"""Commands that show a run from its folder, also while it goes on: `slime report`, `slime samples`, `slime trace`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.core.errors import DataError
from slime.core.text import visible
from slime.observability.samples import FILE_NAME, PICKS, ShownSample, heading, number, read_samples

if TYPE_CHECKING:
    from rich.console import Console

# `slime report RUN`: the report of a run, made again from its folder, of a running run too.


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """Whose."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the folder of a run")


def run_report(options: argparse.Namespace) -> int:
    """Makes the report of a run, prints its text and where it is. Raises `DataError` for a folder without steps."""
    from slime.observability.report import summary_text, write_report

    made = write_report(options.run_dir)
    print(summary_text(made.summary, made.title))
    for name, path in (("page", made.page), ("picture", made.picture), ("text", made.text)):
        print(f"{name}: {path}")
    return 0


# `slime samples RUN`: what the model said, from `samples.jsonl` of a run folder; of a running run, too.

DEFAULT_NUM = 6


def add_samples_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--step", type=int, help="of this step, as metrics.jsonl counts (default: of the last ones)")
    parser.add_argument("--best", action="store_true", help="only the best of each step")
    parser.add_argument("--worst", action="store_true", help="only the worst of each step")
    parser.add_argument("--eval", action="store_true", help="of evaluations (default: of training steps, if any)")
    parser.add_argument("--dataset", metavar="NAME", help="of evaluations on this dataset")
    parser.add_argument("--json", action="store_true", help="one JSON object per line, as in samples.jsonl")
    parser.add_argument("-n", type=int, metavar="N", help=f"at most so many, the newest (default: {DEFAULT_NUM})")


def run_samples(options: argparse.Namespace) -> int:
    """Prints the samples that were asked for. Raises `DataError` if there are none."""
    path = options.run_dir / FILE_NAME
    samples = read_samples(path)
    if not samples:
        raise DataError(
            f"got {options.run_dir}, which holds no samples ({FILE_NAME}), because no step is done yet, the run had "
            "--log-samples 0, or it is not a run folder"
        )
    chosen = choose(samples, options)
    if not chosen:
        raise DataError(f"got no sample of that kind in {path}; there are {_what_there_is(samples)}")
    num = options.n if options.n is not None else len(chosen) if options.step is not None else DEFAULT_NUM
    chosen = chosen[len(chosen) - num :] if 0 <= num < len(chosen) else chosen
    try:
        if options.json:
            print("\n".join(json.dumps(sample.to_dict()) for sample in chosen), flush=True)
        else:
            from rich.console import Console

            _show(chosen, Console(highlight=False, soft_wrap=True))
    except BrokenPipeError:  # `| head` has seen enough; Python would complain again when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def choose(samples: Sequence[ShownSample], options: argparse.Namespace) -> list[ShownSample]:
    """Those that the flags ask for, in the order of the file; of a step the best before the worst before others."""
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
    """Kinds, datasets and steps of the file."""
    steps: dict[str, list[int]] = {}
    for sample in samples:
        steps.setdefault(f"{sample.kind} {sample.dataset or ''}".rstrip(), []).append(sample.step)
    return ", ".join(f"{name} of steps {min(seen)} to {max(seen)}" for name, seen in sorted(steps.items()))


def _show(samples: Sequence[ShownSample], console: Console) -> None:
    """Text as it is, with colours on a terminal alone; control characters are spelled out."""
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


def _fact(name: str, value: object) -> str:
    numbers = ", ".join(f"{k} {number(v)}" for k, v in value.items()) if isinstance(value, dict) else value
    return f"{name} {numbers}"


def _part(console: Console, name: str, text: str, style: str) -> None:
    from rich.text import Text

    first, *others = visible(text).split("\n")
    body = "\n".join([f"  {name:>8}  {first}", *(f"            {line}" for line in others)])
    console.print(Text(body, style=style))


# `slime trace RUN`: what driver and rollout side did in all starts of a run, in one file and on one time axis.


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """Whose, and where to."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", type=Path, help="default: trace.json in the run folder")


def run_trace(options: argparse.Namespace) -> int:
    """Writes the file and says where. Raises `DataError` for a folder without traces."""
    from slime.observability.spans import read_trace

    parts = sorted((options.run_dir / "traces").glob("*.json"))
    if not parts:
        raise DataError(f"got {options.run_dir}, which holds no traces/*.json; name the folder of a run")
    events = [event for part in parts for event in read_trace(part)]
    out = options.out or options.run_dir / "trace.json"
    out.write_text(json.dumps({"traceEvents": events}))
    print(f"{len(events)} events of {len(parts)} processes in {out}; open it at https://ui.perfetto.dev")
    return 0
