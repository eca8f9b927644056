"""Logging of one process: short lines on stderr, the same lines with their date in a file of the run folder."""

from __future__ import annotations

import faulthandler
import logging
import os
from pathlib import Path

from slime.core.text import visible

NOISY = ("httpx", "httpcore", "urllib3", "asyncio", "matplotlib", "filelock", "fsspec")
"""Libraries whose INFO lines would bury ours (httpx logs every request)."""


FILE_ONLY = {"file_only": True}
"""`extra=` of a record that belongs into the file and not on the console."""


class VisibleFormatter(logging.Formatter):
    """Spells control characters out: a line may carry what a model, a tool or a dataset says."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, its traceback included."""
        return visible(super().format(record))


def setup_logging(
    log_path: Path | None = None, *, process: str = "", level: int | str = logging.INFO, crashes: bool = False
) -> None:
    """Replaces the handlers of the root logger. Safe to call again.

    `log_path`: also write there. `process`: names the lines; default: the name of the file. `crashes`: where the
    process is when a signal like SIGSEGV ends it is written there, too; for processes whose stderr nobody reads.
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
            faulthandler.enable(os.open(log_path, os.O_WRONLY | os.O_APPEND), all_threads=False)  # as long as it lives
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
