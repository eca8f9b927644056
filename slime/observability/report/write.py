"""Writes the report of a run: `report.md`, `report.html`, `report.png`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime.observability.report.figure import write_picture
from slime.observability.report.page import page
from slime.observability.report.panels import drawn_panels
from slime.observability.report.record import read_run
from slime.observability.report.summary import RunSummary, report_markdown, summary_of


@dataclass(frozen=True, slots=True)
class Report:
    """What was written."""

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
    """Makes the report of a run folder, of a run that goes on, ended or died.

    `out_dir`: default the run folder. `title`: default model, data and method. Raises `DataError` if no step was
    logged.
    """
    record = read_run(run_dir)
    title, panels, summary = title or record.title, drawn_panels(record), summary_of(record)
    out_dir = out_dir or run_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    report = Report(title, summary, *(out_dir / f"report.{suffix}" for suffix in ("md", "html", "png")))
    _write(report.text, report_markdown(record, summary, title))
    _write(report.page, page(record, panels, summary, title))
    write_picture(record, panels, report.picture, title)
    return report


def _write(path: Path, text: str) -> None:
    """Through a file beside it, so that a browser never shows half a page. Half of a surrogate pair becomes `?`."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8", errors="replace")
    partial.replace(path)
