"""`slime report` and `slime trace`: what can be made from a run folder afterwards."""

from __future__ import annotations

import json
from pathlib import Path

from slime.core.errors import DataError


def report(run_dir: Path) -> int:
    """Draws the report of a run and prints its text."""
    from slime.observability.report import summary_text, write_report
    from slime.observability.run_folder import RunFolder, report_title

    folder = RunFolder(run_dir, run_id="")
    if not folder.metrics.is_file():
        raise DataError(f"got {run_dir}, which holds no metrics.jsonl; name the folder of a run")
    args = folder.path / "args.json"
    title = report_title(json.loads(args.read_text())) if args.is_file() else "slime run"
    print(summary_text(write_report(folder.metrics, folder.report_png, title=title), title))
    print(f"picture: {folder.report_png}")
    return 0


def trace(run_dir: Path, out: Path | None) -> int:
    """Joins the traces of all processes of a run on one time axis."""
    from slime.observability.spans import read_trace

    parts = sorted((run_dir / "traces").glob("*.json"))
    if not parts:
        raise DataError(f"got {run_dir}, which holds no traces/*.json; name the folder of a run")
    events = [event for part in parts for event in read_trace(part)]
    out = out or run_dir / "trace.json"
    out.write_text(json.dumps({"traceEvents": events}))
    print(f"{len(events)} events of {len(parts)} processes in {out}; open it at https://ui.perfetto.dev")
    return 0
