"""Hugging Face checkpoints, read and written directly: safetensors one tensor at a time, JSON, and copied assets.

Invariants
1. No whole checkpoint is ever in memory; a reader holds one tensor, a writer one file of at most `MAX_SHARD_BYTES`.
2. No folder is removed that does not hold `EXPORT_MARKER`, the file that an export is begun with.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slime.core.errors import CheckpointError

MAX_SHARD_BYTES = 5 * 1000**3
"""Largest safetensors file that `write_hf` makes."""

ASSETS = ("*.json", "*.jinja", "*.txt", "*.model", "tokenizer*", "LICENSE*")
"""What belongs to a checkpoint besides its weights: config, tokenizer, chat template, generation defaults."""

EXPORT_MARKER = ".slime_export.json"
"""In every folder that an export made: what may be replaced by the next one."""


class HfReader:
    """Reads single tensors of a checkpoint: `with HfReader(dir) as read: read("model.norm.weight")`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()
        self._location = _locate(directory)

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors of the checkpoint."""
        return tuple(self._location)

    def __call__(self, name: str) -> Tensor:
        """The full tensor, on the host, in the dtype of the file. Raises `CheckpointError` if there is none."""
        if name not in self._location:
            raise CheckpointError(f"got no tensor {name!r} in {self._directory}; it holds {len(self._location)} others")
        file = self._location[name]
        if file not in self._files:
            self._files[file] = self._stack.enter_context(
                safe_open(self._directory / file, framework="pt", device="cpu")
            )
        tensor: Tensor = self._files[file].get_tensor(name)
        return tensor

    def __enter__(self) -> HfReader:
        self._stack.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.__exit__(kind, error, trace)


def _locate(directory: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or from the headers."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return weight_map
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"got no *.safetensors in {directory}; convert the checkpoint to safetensors first")
    location: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as opened:
            location.update(dict.fromkeys(opened.keys(), file.name))
    return location


def write_hf(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], *, assets_from: Path, dtype: torch.dtype | None = None
) -> None:
    """Writes safetensors of at most `MAX_SHARD_BYTES` with an index, and copies the assets of `assets_from`.

    `tensors`: (HF name, tensor) in any order; converted to `dtype` unless None. Consumes the iterable once, and holds
    at most one file. `config.json` gets the written dtype.
    """
    directory.mkdir(parents=True, exist_ok=True)
    copy_assets(assets_from, directory)
    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = 0
    written: torch.dtype | None = None

    def flush() -> None:
        nonlocal pending_bytes
        if pending:
            save_file(pending, directory / f"part-{len(files):05d}.safetensors", metadata={"format": "pt"})
            files.append(list(pending))
            pending.clear()
            pending_bytes = 0

    for name, tensor in tensors:
        host = tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        written = host.dtype
        if pending_bytes + host.nbytes > MAX_SHARD_BYTES:
            flush()
        pending[name] = host.clone() if host.data_ptr() == tensor.data_ptr() else host
        pending_bytes += host.nbytes
        total_bytes += host.nbytes
    flush()
    _name_files(directory, files, total_bytes)
    _set_dtype(directory / "config.json", written)


def require_replaceable(directory: Path) -> None:
    """Raises `CheckpointError` unless an export may take the place of `directory`: nothing, empty, or an export."""
    if not directory.exists() and not directory.is_symlink():
        return
    if directory.is_dir() and not directory.is_symlink():
        if (directory / EXPORT_MARKER).is_file() or not any(directory.iterdir()):
            return
        found = "which is not empty and no export of slime"
    else:
        found = "which is no folder"
    raise CheckpointError(
        f"got {directory} to write a Hugging Face export to, {found} ({EXPORT_MARKER} is missing), because replacing "
        "it would delete what is there; name another folder with --save-hf, or move this one away"
    )


def begin_export(directory: Path) -> Path:
    """An empty, marked folder beside `directory` to write its next content to; what a crash left in it is removed.

    Raises `CheckpointError` if `directory` or the folder beside it holds anything but an export.
    """
    partial = directory.with_name(directory.name + ".writing")
    for folder in (directory, partial):
        require_replaceable(folder)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    (partial / EXPORT_MARKER).write_text(json.dumps({"format": 1}) + "\n", encoding="utf-8")
    return partial


def commit_export(partial: Path, directory: Path) -> None:
    """Gives the written folder its name; an earlier export there is removed. Raises `CheckpointError` like `begin`."""
    require_replaceable(directory)
    if directory.exists():
        shutil.rmtree(directory)
    partial.rename(directory)


def copy_assets(source: Path, target: Path) -> None:
    """Copies configuration and tokenizer files, never weights or their index."""
    for pattern in ASSETS:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and not file.name.startswith(".") and not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)


def _name_files(directory: Path, files: list[list[str]], total_bytes: int) -> None:
    """Gives the parts the names that loaders look for; the number of parts is known only now."""
    weight_map: dict[str, str] = {}
    for i, names in enumerate(files):
        final = "model.safetensors" if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / f"part-{i:05d}.safetensors").replace(directory / final)
        weight_map.update(dict.fromkeys(names, final))
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _set_dtype(path: Path, dtype: torch.dtype | None) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = name
    if "dtype" not in config and "torch_dtype" not in config:
        config["torch_dtype"] = name
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
