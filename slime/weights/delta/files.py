"""Files that are whole or not there, and on disk before anybody hears of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.core.files import replace_text, sync_to_disk


def write_json(file: Path, content: Any, *, durable: bool) -> None:
    """Replaces `file` at once. `durable`: it is on disk when this returns."""
    replace_text(file, json.dumps(content), durable=durable)
    if durable:
        sync_to_disk(file.parent)


def read_json(file: Path) -> dict[str, Any] | None:
    """The object in `file`; None if there is none, or something else."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def sync_folder(folder: Path) -> None:
    """All files of a folder, and their names, are on disk when this returns."""
    for file in folder.iterdir():
        if file.is_file() and not file.is_symlink():
            sync_to_disk(file)
    sync_to_disk(folder)
