"""Reads and writes Hugging Face checkpoints directly: safetensors, one tensor at a time, plus config and other assets.

Invariants
1. A full checkpoint is never in memory. Tensors are views of memory-mapped files, whose pages stay in memory until
   `release`. A writer holds the content of one file, at most `MAX_SHARD_BYTES`.
2. A folder is removed only if it contains `EXPORT_MARKER`, the first file that every export writes.
3. A damaged file raises an error with its name before any of its tensors is read.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slime.core.errors import CheckpointError
from slime.core.files import full_disk_named, open_to_readers, read_checkpoint_json, sync_to_disk
from slime.training.state.shards import TensorFile
from slime.weights.quantised.formats import format_of

MAX_SHARD_BYTES = 5 * 1000**3
"""Maximum size of a safetensors file from `write_hf`."""

ASSETS = ("*.json", "*.jinja", "*.txt", "*.model", "tokenizer*", "LICENSE*")
"""Files of a checkpoint other than its weights: config, tokenizer, chat template, generation defaults."""

CHAT_TEMPLATE_FILE = "chat_template.jinja"
"""Takes precedence over all other templates of a tokenizer in the same folder."""

AGAIN = "download or export it again"
EXPORT_MARKER = ".slime_export.json"
"""Marks a folder as an export that the next export may replace."""

_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of quantised codes, which are meaningless without scales."""


class HfReader:
    """Reads individual tensors of a checkpoint: `with HfReader(dir) as read: read("model.norm.weight")`.

    Quantised weights are dequantised and listed under their own names, not under the names of their codes and scales.
    Raises `CheckpointError` with the name of a damaged file, and `ConfigError` for an unsupported quantisation format.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, TensorFile] = {}
        self._touched: set[str] = set()
        self._released = False
        config = directory / "config.json"
        self._config: dict[str, Any] = read_checkpoint_json(config, or_else=AGAIN) if config.is_file() else {}
        self._location = self._locate()
        self._format = format_of(self._config, self._location)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all weights in the checkpoint, in file order."""
        if self._format is None:
            return tuple(self._location)
        of_part = {part: name for name in self._format.names for part in self._format.parts_of(name)}
        hidden = {self._format.about(name) for name in self._format.names}
        return tuple(dict.fromkeys(of_part.get(n, n) for n in self._location if n not in hidden))

    def is_quantised(self, name: str) -> bool:
        return self._format is not None and name in self._format.names

    def __call__(self, name: str) -> Tensor:
        """Returns the full tensor on the host, in the file's dtype, or in float32 if it is quantised. Do not modify it.

        Raises `CheckpointError` if it is missing, or if its scales are missing or have the wrong shape.
        """
        if self._format is not None and name in self._format.names:
            parts = self._format.parts_of(name)
            try:
                return self._format.dequantise([self._read(part) for part in parts])
            except CheckpointError as error:
                place = self._directory / self._location.get(parts[0], "")
                raise CheckpointError(f"{place}, {name}: {error}") from error
        tensor = self._read(name)
        if tensor.dtype in _CODES:
            raise CheckpointError(
                f"{self._directory / self._location[name]}, {name}: {tensor.dtype} codes cannot be read as weights "
                "without their scales or a quantization_config in config.json; download all files of the checkpoint"
            )
        return tensor

    def plain(self, name: str) -> Tensor:
        """Like a call, but returns quantised weights in the dtype of config.json (default: bfloat16)."""
        tensor = self(name)
        return tensor.to(_config_dtype(self._config)) if self.is_quantised(name) else tensor

    def release(self) -> None:
        """Frees the memory of the tensors read since the last release. They stay valid: accessing one rereads the file.

        Can be called repeatedly while these tensors are in use: until the next read, each call frees the same tensors.
        """
        self._released = True
        for file in self._touched:
            self._files[file].release()

    def __enter__(self) -> HfReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._touched.clear()
        self._files.clear()  # a mapping is closed when its last view is gone

    def _read(self, name: str) -> Tensor:
        if name not in self._location:
            raise CheckpointError(f"{self._directory} has {len(self._location)} tensors but not {name!r}; {AGAIN}")
        file = self._location[name]
        opened = self._open(file)
        if self._released:
            self._touched, self._released = set(), False
        self._touched.add(file)
        return opened.read(name)

    def _open(self, file: str) -> TensorFile:
        if file not in self._files:
            self._files[file] = TensorFile(self._directory / file)
        return self._files[file]

    def _locate(self) -> dict[str, str]:
        index = self._directory / "model.safetensors.index.json"
        if index.exists():
            weight_map = read_checkpoint_json(index, or_else=AGAIN).get("weight_map")
            if not isinstance(weight_map, dict) or any(Path(str(file)).name != file for file in weight_map.values()):
                raise CheckpointError(
                    f"the weight_map of {index} is missing or has values that are not plain file names; {AGAIN}"
                )
            return weight_map
        files = sorted(self._directory.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{self._directory} has no *.safetensors; convert the checkpoint to safetensors")
        return {name: file.name for file in files for name in self._open(file.name).names}


@dataclass(frozen=True, slots=True)
class Writers:
    """The ranks that take turns writing the files of an export."""

    rank: int = 0
    """Rank 0 also writes the index, the config and the assets."""
    size: int = 1
    meet: Callable[[], None] = lambda: None


def write_hf(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    assets_from: Path,
    carried: Callable[[str], bool] | None = None,
    quantization: Mapping[str, Any] | None = None,
    writers: Writers = Writers(),
) -> None:
    """Writes safetensors files of at most `MAX_SHARD_BYTES` with an index, and copies the assets of `assets_from`.

    `tensors`: (HF name, tensor) in any order, written unchanged. They are consumed once, with at most one file's worth
    in memory. `carried` selects tensors of `assets_from` to append. `config.json` gets the dtype that
    takes up the most bytes, and `quantization` replaces the original entry. With several `writers`, each rank calls
    this with the same tensors and an existing shared folder. On return, the weights are on disk.
    """
    if writers.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        copy_assets(assets_from, directory)
    files: list[list[str]] = [[]]
    pending: dict[str, Tensor] = {}
    pending_bytes = 0
    written_bytes: Counter[torch.dtype] = Counter()

    def flush() -> None:
        if pending:
            part = directory / f"part-{len(files) - 1:05d}.safetensors"
            with full_disk_named(directory):
                save_file(pending, part, metadata={"format": "pt"})
                open_to_readers(part)
                sync_to_disk(part)
            pending.clear()

    for name, tensor in _chained(tensors, assets_from, carried):
        if files[-1] and pending_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            flush()
            files.append([])
            pending_bytes = 0
        files[-1].append(name)
        if (len(files) - 1) % writers.size == writers.rank:
            # Copy the tensor, because it can be a view of a parameter or of a file.
            pending[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        pending_bytes += tensor.nbytes
        written_bytes[tensor.dtype] += tensor.nbytes
    flush()
    writers.meet()  # every file is complete
    if writers.rank != 0:
        return
    _name_files(directory, [names for names in files if names], sum(written_bytes.values()))
    plain = Counter({dtype: num for dtype, num in written_bytes.items() if dtype not in _CODES})
    _write_config(directory / "config.json", max(plain, key=lambda d: plain[d], default=None), quantization)


def with_duplicates(
    tensors: Iterable[tuple[str, Tensor]], duplicates: Mapping[str, str], wanted: Container[str]
) -> Iterable[tuple[str, Tensor]]:
    """Yields `tensors`, each followed by its `FamilyTable.duplicates` that are in `wanted`."""
    for name, tensor in tensors:
        yield name, tensor
        yield from ((other, tensor) for other, source in duplicates.items() if source == name and other in wanted)


def with_duplicates_of(
    source: Path, tensors: Iterable[tuple[str, Tensor]], duplicates: Mapping[str, str]
) -> Iterable[tuple[str, Tensor]]:
    """Yields `tensors` plus the duplicates that the checkpoint `source` contains; see `with_duplicates`."""
    if not duplicates:
        return tensors
    with HfReader(source) as read:
        return with_duplicates(tensors, duplicates, frozenset(read.names))


def _chained(
    tensors: Iterable[tuple[str, Tensor]], source: Path, carried: Callable[[str], bool] | None
) -> Iterable[tuple[str, Tensor]]:
    yield from tensors
    if carried is not None:
        with HfReader(source) as read:
            for name in filter(carried, read.names):
                yield name, read.plain(name)
                read.release()


def require_replaceable(directory: Path) -> None:
    """Raises `CheckpointError` unless `directory` is missing, is empty, or contains an earlier export."""
    if not directory.exists() and not directory.is_symlink():
        return
    if directory.is_dir() and not directory.is_symlink():
        if (directory / EXPORT_MARKER).is_file() or not any(directory.iterdir()):
            return
        found = "is not empty and was not exported by slime"
    else:
        found = "is not a folder"
    raise CheckpointError(
        f"{directory} {found} ({EXPORT_MARKER} is missing), and a Hugging Face export would delete it; set --save-hf "
        "to another folder, or move this one elsewhere"
    )


def begin_export(directory: Path) -> Path:
    """Creates an empty, marked folder next to `directory` for its new content, replacing any leftovers from a crash.

    Raises `CheckpointError` if `directory` or the folder next to it contains anything but an export.
    """
    require_room(directory)
    partial = being_written(directory)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    (partial / EXPORT_MARKER).write_text(json.dumps({"format": 1}) + "\n", encoding="utf-8")
    return partial


def require_room(directory: Path) -> None:
    """Raises `CheckpointError` unless `directory` and the temporary folders next to it can be replaced by an export."""
    for folder in (directory, being_written(directory), _replaced(directory)):
        require_replaceable(folder)


def being_written(directory: Path) -> Path:
    """Returns the temporary folder next to `directory` for its new content."""
    return directory.with_name(directory.name + ".writing")


def commit_export(partial: Path, directory: Path) -> None:
    """Renames `partial` to `directory` and removes the earlier export. Raises `CheckpointError` like `begin_export`.

    The earlier export is renamed before its files are removed, so `directory` is always complete and on disk.
    """
    old = _replaced(directory)
    for folder in (directory, old):
        require_replaceable(folder)
    for path in (*partial.rglob("*"), partial):
        sync_to_disk(path)
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    partial.rename(directory)
    sync_to_disk(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def _replaced(directory: Path) -> Path:
    return directory.with_name(directory.name + ".replaced")


def copy_assets(source: Path, target: Path) -> None:
    """Copies config and tokenizer files, but neither weights nor their index."""
    for pattern in ASSETS:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and not file.name.startswith(".") and not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)


def _name_files(directory: Path, files: list[list[str]], total_bytes: int) -> None:
    weight_map: dict[str, str] = {}
    for i, names in enumerate(files):
        final = "model.safetensors" if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / f"part-{i:05d}.safetensors").replace(directory / final)
        weight_map.update(dict.fromkeys(names, final))
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_config(path: Path, dtype: torch.dtype | None, quantization: Mapping[str, Any] | None) -> None:
    config = read_checkpoint_json(path, or_else=AGAIN)
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        part.pop("quantization_config", None)
        keys = [key for key in ("dtype", "torch_dtype") if key in part]
        for key in keys or (["torch_dtype"] if part is config else []):
            part[key] = str(dtype).removeprefix("torch.")
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _config_dtype(config: Mapping[str, Any]) -> torch.dtype:
    text = config.get("text_config") or {}
    named = next((c[key] for c in (config, text) for key in ("dtype", "torch_dtype") if c.get(key)), "bfloat16")
    dtype = getattr(torch, str(named), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def export(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    source: Path,
    carried: Callable[[str], bool],
    writers: Writers,
    rest: Callable[[Path], None],
) -> None:
    """Writes `tensors` and the assets of the checkpoint `source`, replacing any earlier export. Collective.

    All writers share the folder. Once the weights are written, each writer calls `rest` with the unfinished folder. If
    `directory` contains anything but an export, raises `CheckpointError` and changes nothing.
    """
    require_room(directory)  # on every rank, so that all of them fail together
    writers.meet()  # before rank 0 creates the folder
    if writers.rank == 0:
        begin_export(directory)
    writers.meet()  # the folder exists
    partial = being_written(directory)
    write_hf(partial, tensors, assets_from=source, carried=carried, writers=writers)
    rest(partial)
    if writers.rank == 0:
        commit_export(partial, directory)
    writers.meet()
