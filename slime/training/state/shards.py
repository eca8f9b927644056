"""Checkpoint shards: a model's files in a checkpoint, readable under any parallel layout. Needs torch but no ranks.

A checkpoint shard is a flat range of one tensor-parallel shard of one parameter, in one role. Each rank writes its
checkpoint shards to `rank_NNNNN.safetensors` and describes them in `rank_NNNNN.json`. The folder `hf/` next to these
files has the model's config and tokenizer, so that a checkpoint is self-contained.

Invariants
1. A range that no checkpoint shard covers raises `CheckpointError`. It is never filled with zeros.
2. A reader holds one parameter at a time in memory.
3. Writing does not copy host tensors, and never holds the GIL for long, because bytes are written and hashed in chunks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import mmap
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.core.errors import CheckpointError
from slime.core.files import read_checkpoint_json
from slime.core.hf_config import HfConfig, read_hf_config
from slime.models import table_for
from slime.models.common.mtp import PREFIX, with_mtp
from slime.models.common.table import Entry, FamilyTable
from slime.training.state.adapter_files import A, adapters_alone, merge, with_adapters
from slime.training.state.checkpoint import HashedFile, Seal, latest, verify
from slime.weights.hf_shards import export, export_stack, load_shard

MAX_HEADER_BYTES = 100 * 1000**2
"""Maximum size of a safetensors header, as in the safetensors library."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in safetensors files."""


class TensorFile:
    """A memory-mapped safetensors file. Raises `CheckpointError` with the file's name if it is damaged.

    The safetensors library keeps every page that it has read in memory until the file is closed. This reader can
    release pages.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            (size,) = struct.unpack_from("<Q", self._map)
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"its header claims {size} bytes")
            header = json.loads(self._map[8 : 8 + size])
            self._tensors = {
                name: (DTYPES[t["dtype"]], [int(n) for n in t["shape"]], 8 + size + int(t["data_offsets"][0]))
                for name, t in header.items()
                if name != "__metadata__"
            }
            end = 8 + size
            for dtype, shape, start in sorted(self._tensors.values(), key=lambda t: (t[2], math.prod(t[1]))):
                if start != end:
                    raise ValueError(f"a tensor starts at byte {start} instead of {end}")
                end += math.prod(shape) * dtype.itemsize
            if end != len(self._map):
                raise ValueError(f"it has {len(self._map)} bytes instead of {end}")
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise CheckpointError(
                f"{path} is missing or is not a complete safetensors file ({error}); download or export it again"
            ) from error

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def read(self, name: str) -> Tensor:
        """Returns a view of the memory-mapped file. Writes to the view are lost at the next release."""
        if name not in self._tensors:
            raise CheckpointError(f"{self._path} is damaged: {name} is missing; load a different checkpoint")
        dtype, shape, start = self._tensors[name]
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=start).view(shape)

    def release(self) -> None:
        """Frees the memory of the tensors read so far. They stay valid: accessing one rereads the file."""
        self._map.madvise(mmap.MADV_DONTNEED)


FORMAT = 3
MODEL, MASTER = "model", "master"
OTHER_POLICY = "copy."
"""Roles of weights, and the role prefix of additional policies. All other roles are names of optimizer states."""
SHARDS_KEY = "pieces"
"""Key of the checkpoint shards in a rank's JSON file, in format 3."""
HF = "hf"
"""Folder with the model's config.json and tokenizer."""

_CHUNK_BYTES = 1 << 24
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_NOT_ARCHITECTURE = frozenset(
    {
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "max_position_embeddings",
        "quantization_config",
        "attention_dropout",
    }
)
"""Keys of config.json that can differ for the same model."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointShard:
    """Elements [start, end) of one flattened tensor-parallel shard, in one role."""

    role: str
    name: str
    """Global name of the parameter (`training.model.parameter_names`)."""
    tp_rank: int
    """0 of 1 if the parameter is replicated on tensor-parallel ranks."""
    tp_size: int
    shape: tuple[int, ...]
    """Shape of the tensor-parallel shard."""
    start: int
    end: int
    dtype: str

    @property
    def key(self) -> str:
        """Name of the tensor in its file."""
        return f"{self.role}/{self.name}/{self.tp_rank}-of-{self.tp_size}/{self.start}"


def architecture(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of config.json that determine a model's weights and computation."""
    return {k: v for k, v in hf_config.items() if k not in _NOT_ARCHITECTURE and not k.startswith("_")}


def digest_of(hf_config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(architecture(hf_config), sort_keys=True).encode()).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Seal:
    """Writes a safetensors file, one tensor at a time, and flushes it to disk. Returns its size and hash."""
    # Wider dtypes come first, as in the library, so that each tensor is aligned to its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        dtype, shape = _CODES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            content = flat.view(torch.uint8).numpy().data
            for i in range(0, len(content), _CHUNK_BYTES):
                file.write(content[i : i + _CHUNK_BYTES])
    return file.seal


def write_meta(path: Path, meta: Mapping[str, Any]) -> Seal:
    with HashedFile(path) as file:
        file.write(json.dumps(meta, indent=None, separators=(",", ":")).encode())
    return file.seal


class ShardReader:
    """Reads the shards of one model: `ShardReader(folder).shard("model", name, 0)`. Keeps its files open."""

    def __init__(self, folder: Path) -> None:
        """Reads every rank's JSON file. Raises `CheckpointError` with the name of a missing or damaged file."""
        self.folder = folder
        files = sorted(folder.glob("rank_*.json"))
        if not files:
            raise CheckpointError(f"{folder} contains no model: rank_*.json is missing; choose a different checkpoint")
        self.metas = [_read_meta(file) for file in files]
        world_size = int(self.metas[0]["layout"]["world_size"])
        missing = {f"rank_{rank:05d}.json" for rank in range(world_size)} - {file.name for file in files}
        if missing or len(files) != world_size:
            raise CheckpointError(
                f"{folder} has files from {len(files)} ranks instead of {world_size} (missing: {sorted(missing)[:4]}); "
                "load a different checkpoint"
            )
        self._shards: dict[tuple[str, str], list[tuple[Path, CheckpointShard]]] = {}
        for file, meta in zip(files, self.metas, strict=True):
            for role, name, tp_rank, tp_size, shape, *rest in meta[SHARDS_KEY]:
                shard = CheckpointShard(role, name, tp_rank, tp_size, tuple(shape), *rest)
                self._shards.setdefault((role, name), []).append((file.with_suffix(".safetensors"), shard))
        self._names: dict[str, set[str]] = {}
        for role, name in self._shards:
            self._names.setdefault(role, set()).add(name)
        self._open: dict[Path, TensorFile] = {}
        self._touched: TensorFile | None = None

    @property
    def roles(self) -> Collection[str]:
        return self._names.keys()

    def names(self, role: str) -> Collection[str]:
        return self._names.get(role, ())

    def any_shard(self, role: str, name: str) -> CheckpointShard:
        """Returns any shard of a parameter, to show how it is split. Raises `CheckpointError` if there is none."""
        if (role, name) not in self._shards:
            raise CheckpointError(
                f"{self.folder} has no {role} for {name}; it was written with a different model or different settings, "
                "such as another --optimizer"
            )
        return self._shards[role, name][0][1]

    def flat(self, role: str, name: str, tp_rank: int, start: int, end: int) -> Tensor:
        """Returns elements [start, end) of a flattened shard, on the host.

        Raises `CheckpointError` if elements are missing.
        """
        found = [(f, s) for f, s in self._shards.get((role, name), ()) if s.tp_rank == tp_rank]
        parts, at = [], start
        for file, shard in sorted(found, key=lambda item: item[1].start):
            if shard.start <= at < min(shard.end, end):
                parts.append(self._read(file, shard.key)[at - shard.start : min(shard.end, end) - shard.start])
                at = min(shard.end, end)
        if at != end:
            raise CheckpointError(
                f"elements {at} to {end} of shard {tp_rank} of {role} of {name} are missing from {self.folder}: the "
                "checkpoint is incomplete; load a different checkpoint"
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)

    def shard(self, role: str, name: str, tp_rank: int) -> Tensor:
        shape = self.any_shard(role, name).shape
        return self.flat(role, name, tp_rank, 0, torch.Size(shape).numel()).reshape(shape)

    def shards(self, role: str, name: str) -> list[Tensor]:
        return [self.shard(role, name, rank) for rank in range(self.any_shard(role, name).tp_size)]

    def tensor(self, rank: int, key: str) -> Tensor:
        """Returns a copy of a tensor that belongs to one rank, such as an RNG state."""
        return self._read(self.folder / f"rank_{rank:05d}.safetensors", key).clone()

    def _read(self, file: Path, key: str) -> Tensor:
        """Returns a view of a tensor in a file. The next read frees its memory."""
        if self._touched is not None:
            self._touched.release()
        if file not in self._open:
            self._open[file] = TensorFile(file)
        self._touched = self._open[file]
        return self._touched.read(key)


def split_again(reader: ShardReader, table: FamilyTable, role: str, name: str, *, tp_rank: int, tp_size: int) -> Tensor:
    """Returns shard `tp_rank` of `tp_size` of a parameter that the checkpoint splits differently."""
    whole = dict(export(table, name, reader.shards(role, name)))
    return load_shard(table, name, whole.__getitem__, tp_rank=tp_rank, tp_size=tp_size)


def iter_full(
    table: FamilyTable,
    shards: Callable[[Entry], Sequence[Tensor]],
    stack: Callable[[Entry], Tensor | None] = lambda _first: None,
) -> Iterator[tuple[str, Tensor]]:
    """Merges each entry's shards and yields (HF name, full tensor) in table order. Stacks experts that share a tensor.

    `stack` is called with the first expert of a row and can return a single tensor with all of the row's experts.
    """
    for run in table.runs:
        whole = stack(run[0])
        if whole is not None:
            yield from export_stack(run, whole)
            continue
        stacks: dict[str, list[Tensor]] = {}
        for entry in run:
            for name, tensor in export(table, entry.megatron, shards(entry)):
                if entry.row.stacked:
                    stacks.setdefault(name, []).append(tensor)
                else:
                    yield name, tensor
        for name in tuple(stacks):
            yield name, torch.stack(stacks.pop(name))


class OpenCheckpoint:
    """A committed checkpoint that is read without ranks, for `slime convert`."""

    hf_config: dict[str, Any]
    """The policy's config, as returned by `read_hf_config`."""
    table: FamilyTable
    assets: Path

    def __init__(self, folder: Path) -> None:
        """Raises `CheckpointError` if `folder` has no model."""
        self.reader = ShardReader(folder)
        self.assets = folder / HF
        self.hf_config = read_hf_config(str(self.assets))
        self.table = self.table_of(self.hf_config)

    def table_of(self, hf_config: HfConfig) -> FamilyTable:
        """Returns the table for a config, including the MTP layer if it was trained."""
        trained = any(name.startswith(PREFIX) for name in self.reader.names(MODEL))
        return table_for(with_mtp(hf_config) if trained else hf_config)

    def iter_hf(self, role: str = MODEL) -> Iterator[tuple[str, Tensor]]:
        """Yields (HF name, full tensor) in table order, one at a time, with adapters merged.

        Role "master" selects the optimizer's float32 weights where the checkpoint has them.
        """
        held = self.reader.names(role)

        def found(name: str) -> list[Tensor]:
            return self.reader.shards(role if name in held else MODEL, name)

        def shards(entry: Entry) -> list[Tensor]:
            """Returns shards with adapters merged as in an export, except that master weights stay float32."""
            weights, linear = found(entry.megatron), entry.megatron.removesuffix("weight")
            if linear + "lora_a" not in self.reader.names(MODEL):
                return weights
            a, b = found(linear + "lora_a"), found(linear + "lora_b")
            scale = self.reader.metas[0]["adapter_scale"]
            merged = [merge(w, a[r % len(a)], b[r % len(b)], scale) for r, w in enumerate(weights)]
            return merged if role == MASTER else [m.to(w.dtype) for m, w in zip(merged, weights, strict=True)]

        return iter_full(self.table, shards)

    def adapters(self) -> tuple[FamilyTable, float, Iterator[tuple[str, Tensor]]]:
        """Returns the table with adapter rows, the adapters' scale, and (name, full tensor) of each adapter.

        Raises `CheckpointError` if the checkpoint has no adapters.
        """
        names = [name for name in self.reader.names(MODEL) if name.endswith(A)]
        if not names:
            raise CheckpointError(f"{self.reader.folder} has no adapters: its run did not set --lora-rank")
        rank = int(self.reader.any_shard(MODEL, names[0]).shape[0])
        table = with_adapters(self.table, {name.removesuffix(A) + "weight" for name in names}, rank)
        alone = adapters_alone(table)
        found = iter_full(alone, lambda entry: self.reader.shards(MODEL, entry.megatron))
        return table, float(self.reader.metas[0]["adapter_scale"]), found


@contextmanager
def open_checkpoint(path: Path) -> Iterator[OpenCheckpoint]:
    """Opens a checkpoint, or the latest one in a `--save` folder, after verifying the hash of every file.

    Raises `CheckpointError` if `path` contains no checkpoint, or a damaged one.
    """
    found = latest(path)
    if found is None:
        raise CheckpointError(f"{path} has no checkpoint; pass a --save folder, or one of its step_* folders")
    verify(found.path)
    yield OpenCheckpoint(found.path)


def _read_meta(file: Path) -> dict[str, Any]:
    meta = read_checkpoint_json(file)
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} has checkpoint format {meta.get('format')}, but this release reads only format {FORMAT}; export "
            "the checkpoint with the release that saved it"
        )
    return meta
