"""Logging setup of a process: short lines on stderr, and the same lines with dates in a file of the run folder."""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import sys
import threading
from pathlib import Path

from slime.core.text import visible

NOISY = ("httpx", "httpcore", "urllib3", "asyncio", "matplotlib", "filelock", "fsspec")
"""Libraries that log too much at INFO level (httpx logs every request)."""
FILE_ONLY = {"file_only": True}
"""Pass as `extra=` to log to the file but not to the console."""

TELL_DRIVER = {"tell_driver": True}
"""Pass as `extra=` to also show a warning from the rollout process on the console, where the driver logs it."""


class ForDriver(logging.Handler):
    """Collects the messages logged with `TELL_DRIVER`. Ray does not forward the output of actors, so otherwise they
    would never reach the console.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "tell_driver", False):
            self._held.append(record.getMessage())

    def take(self) -> tuple[str, ...]:
        """Returns the messages since the last call."""
        held, self._held = tuple(self._held), []
        return held


class VisibleFormatter(logging.Formatter):
    """Escapes control characters, because a line may contain text from a model, tool or dataset."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _Printed(io.TextIOBase):
    """Logs each line that code prints. Lines count as complete at a newline or carriage return."""

    def __init__(self, name: str) -> None:
        self._log, self._rest, self._busy = logging.getLogger(name), "", threading.local()

    def write(self, text: str) -> int:
        if getattr(self._busy, "is_logging", False):  # a handler that fails prints
            return len(text)
        *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
        self._busy.is_logging = True
        try:
            for line in filter(str.strip, lines):
                self._log.info("%s", line)
        finally:
            self._busy.is_logging = False
        return len(text)

    def writable(self) -> bool:
        return True


def setup_logging(
    log_path: Path | None = None, *, process: str = "", level: int | str = logging.INFO, crashes: bool = False
) -> None:
    """Replaces the root logger's handlers. Can be called again.

    `log_path`: file to log to. `process`: name shown in each line; default: the name of the file. `crashes`: nobody
    reads the stdout and stderr of the process, so what Python code prints is logged too, and the file gets the stack
    when a signal like SIGSEGV kills the process.
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
            sys.stdout, sys.stderr = _Printed("stdout"), _Printed("stderr")
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
