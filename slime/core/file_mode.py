"""Permissions of files that a library wrote through a private temporary file."""

from __future__ import annotations

import os
from pathlib import Path

_STATUS = Path("/proc/self/status")


def open_to_readers(path: Path) -> None:
    """Gives a file the mode that an ordinary one of this process has, by its umask: safetensors leaves 0600."""
    os.chmod(path, 0o666 & ~_umask())


def _umask() -> int:
    """Of this process. `os.umask` would have to change it to tell, for every thread."""
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Umask":
            return int(value, 8)
    return 0o077
