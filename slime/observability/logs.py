"""Logging of one process: short lines on stderr, and the same lines with dates in a file of the run folder."""

from __future__ import annotations

import faulthandler
import logging
import os
from pathlib import Path

from slime.core.text import visible

NOISY = ("httpx", "httpcore", "urllib3", "asyncio", "matplotlib", "filelock", "fsspec")
"""Libraries whose INFO lines would drown ours (httpx logs every request)."""


FILE_ONLY = {"file_only": True}
"""`extra=` for a record that goes to the file but not to the console."""


class VisibleFormatter(logging.Formatter):
    """Escapes control characters, because a line may contain text of a model, a tool or a dataset."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the escaped line, with its traceback."""
        return visible(super().format(record))


def setup_logging(
    log_path: Path | None = None, *, process: str = "", level: int | str = logging.INFO, crashes: bool = False
) -> None:
    """Replaces the handlers of the root logger. Safe to call again.

    `log_path`: also log to this file. `process`: prefix of the lines; default: the file's name. `crashes`: on a fatal
    signal like SIGSEGV, write a traceback to the file; for processes whose stderr is not read.
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
            faulthandler.enable(os.open(log_path, os.O_WRONLY | os.O_APPEND), all_threads=False)  # never closed
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
