"""`slime report RUN`: the report of a run, made again from its folder, of a running run too."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Whose."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the folder of a run")


def run(options: argparse.Namespace) -> int:
    """Makes the report of a run, prints its text and where it is. Raises `DataError` for a folder without steps."""
    from slime.observability.report import summary_text, write_report

    made = write_report(options.run_dir)
    print(summary_text(made.summary, made.title))
    for name, path in (("page", made.page), ("picture", made.picture), ("text", made.text)):
        print(f"{name}: {path}")
    return 0
