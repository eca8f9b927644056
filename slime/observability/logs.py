"""Logging of one process: short lines on stderr, and the same lines with their date in a file of the run folder."""

from __future__ import annotations

import faulthandler
import logging
import os
from pathlib import Path

from slime.core.text import visible

NOISY = ("httpx", "httpcore", "urllib3", "asyncio", "matplotlib", "filelock", "fsspec")
"""Libraries with too many INFO lines (httpx logs every request)."""
FILE_ONLY = {"file_only": True}
"""`extra=` of a record for the file only, not for the console."""


class VisibleFormatter(logging.Formatter):
    """Spells out control characters, since a line may contain text of a model, a tool or a dataset."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def setup_logging(
    log_path: Path | None = None, *, process: str = "", level: int | str = logging.INFO, crashes: bool = False
) -> None:
    """Replaces the handlers of the root logger. Can be called again.

    `log_path`: a file for the same lines. `process`: a name for the lines; default: the name of the file. `crashes`:
    also write the stack to the file when a signal like SIGSEGV kills the process, because its stderr is not read.
    """
    process = process or (log_path.stem if log_path is not None else "slime")
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    line = f"%(levelname).1s {process} %(name)s | %(message)s"
    console = logging.StreamHandler()
    console.setFormatter(VisibleFormatter(f"%(asctime)s {line}", "%H:%M:%S"))
    console.addFilter(lambda record: not getattr(record, "file_only", False))
    root.addHandler(console)
    if log_path is not None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(log_path)
        file.setFormatter(VisibleFormatter(f"%(asctime)s {line}"))
        root.addHandler(file)
        if crashes:
            faulthandler.enable(os.open(log_path, os.O_WRONLY | os.O_APPEND), all_threads=False)  # stays open
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
