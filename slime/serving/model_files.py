"""Which of SGLang's model files an engine can do without.

A scheduler imports the files of all models, two hundred of them, to find the class that `config.json` names; some of
them import other frameworks, Megatron-core among them, if they are installed. A variable of SGLang names files to leave
out. Which file defines a class is a matter of reading, not of importing.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

LEAVE_OUT_ENV = "SGLANG_DISABLED_MODEL_ARCHS"
ALWAYS_WANTED = frozenset({"transformers"})
"""SGLang's fallback for what no other file defines."""
CHOOSE_ANOTHER_CLASS = ("speculative", "model_impl", "json_model_override_args", "quantization", "model_config_parser")
"""Beginnings of settings under which SGLang may look for a class that `config.json` does not name."""


def files_left_out(model_path: str, settings: Mapping[str, Any]) -> list[str]:
    """Names of the files that a server of `model_path` need not import; none where that is not certain.

    `settings`: the user's ServerArgs by field name.
    """
    if any(name.startswith(CHOOSE_ANOTHER_CLASS) and value for name, value in settings.items()):
        return []
    config = Path(model_path) / "config.json"
    spec = importlib.util.find_spec("sglang")
    if not config.is_file() or spec is None or not spec.submodule_search_locations:
        return []
    wanted = json.loads(config.read_text()).get("architectures") or []
    return left_out(wanted, Path(spec.submodule_search_locations[0]) / "srt" / "models")


def left_out(wanted: Collection[str], folder: Path) -> list[str]:
    """Names of the files in `folder` that define none of the `wanted` classes; none if one of those is nowhere."""
    classes = {
        path.stem: set(re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)) for path in folder.glob("*.py")
    }
    if not wanted or not set(wanted) <= set().union(*classes.values()):
        return []
    keep = {name for name, defined in classes.items() if defined & set(wanted)} | ALWAYS_WANTED
    return sorted(classes.keys() - keep)
