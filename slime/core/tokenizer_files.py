"""What the files of a checkpoint's tokenizer are called, and whether they are code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

CONFIG, FAST = "tokenizer_config.json", "tokenizer.json"


def is_code(folder: Path) -> bool:
    """Whether the tokenizer of a checkpoint is Python code of its own, and nothing else."""
    path = folder / CONFIG
    if not path.is_file() or (folder / FAST).is_file():
        return False
    auto_map = json.loads(path.read_text()).get("auto_map") or {}
    return not isinstance(auto_map, Mapping) or "AutoTokenizer" in auto_map
