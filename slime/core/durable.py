"""Files that are on disk: what was written to them survives a host that stops."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Writes a file that is the old one or the new one, whatever happens. `durable`: it is on disk when this returns;
    its name is once `sync_to_disk` has returned for its folder.
    """
    replace_bytes(path, text.encode(), durable=durable)


def replace_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """`replace_text` of bytes."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        if durable:
            sync_to_disk(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync_to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
