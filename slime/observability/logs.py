"""Logging of one process: short lines on stderr, the same lines with their date in `logs/<process>.log`."""

from __future__ import annotations

import logging
from pathlib import Path

NOISY = ("httpx", "httpcore", "urllib3", "asyncio", "matplotlib", "filelock", "fsspec")
"""Libraries whose INFO lines would bury ours (httpx logs every request)."""


def setup_logging(process: str, log_dir: Path | None = None, level: int | str = logging.INFO) -> None:
    """Replaces the handlers of the root logger. `process` names the line and the file. Safe to call again."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    line = f"%(levelname).1s {process} %(name)s | %(message)s"
    console = logging.StreamHandler()
    console.setFormatter(logging.Formatter(f"%(asctime)s {line}", "%H:%M:%S"))
    root.addHandler(console)
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(log_dir / f"{process}.log")
        file.setFormatter(logging.Formatter(f"%(asctime)s {line}"))
        root.addHandler(file)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
