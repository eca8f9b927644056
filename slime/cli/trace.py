"""`slime trace RUN`: what driver and rollout side did in all starts of a run, in one file and on one time axis."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from slime.core.errors import DataError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Whose, and where to."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", type=Path, help="default: trace.json in the run folder")


def run(options: argparse.Namespace) -> int:
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
