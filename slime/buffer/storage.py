"""JSON files that are either wholly there or not: written beside, flushed to the disk, then renamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.core.errors import CheckpointError
from slime.core.files import replace_text, sync_to_disk


def write_json(path: Path, text: str) -> None:
    """Writes JSON text durably; a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)
    sync_to_disk(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """Reads one JSON object. Raises `CheckpointError` if it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"got no readable file {path} ({error}); the checkpoint is incomplete") from error
    except ValueError as error:
        raise CheckpointError(f"got damaged JSON in {path} ({error}); the file was truncated or altered") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"got {type(value).__name__} in {path}; a JSON object was written there")
    return value
