"""The folder of a version: a Hugging Face folder in the shared one, by a name that says its number."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from slime.core.errors import WeightSyncError

WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
"""Files of the source checkpoint that are left out: they hold the old weights."""
_FOLDER = re.compile(r"weight_v(\d{6,})")


def folder_of(version: int) -> str:
    """The name of a version's folder."""
    return f"weight_v{version:06d}"


def version_of(folder: str) -> int | None:
    """The version of a folder's name; None if it is none of ours."""
    found = _FOLDER.fullmatch(folder)
    return int(found[1]) if found else None


def written_as(version: int) -> str:
    """The name of the folder while it is written."""
    return f".{folder_of(version)}.tmp"


def add_assets(folder: Path, checkpoint: Path, put: Callable[[Path, Path], object]) -> None:
    """Config and tokenizer of `checkpoint`; `put` gets each file and its place. Raises `WeightSyncError` without a
    config.json.
    """
    for asset in checkpoint.iterdir():
        if asset.is_file() and not asset.name.endswith(WEIGHT_SUFFIXES):
            put(asset, folder / asset.name)
    if not (folder / "config.json").exists():
        raise WeightSyncError(f"got no config.json in {checkpoint}; engines cannot load weights without it")


def write_index(folder: Path, weight_map: Mapping[str, str], num_bytes: int) -> None:
    """Which file holds which tensor, and the bytes of all of them."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
