"""Files that are on disk: what was written to them survives a host that stops."""

from __future__ import annotations

import os
from pathlib import Path


def sync_to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
