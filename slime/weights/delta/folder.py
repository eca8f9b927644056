"""The shared folder of weight versions: manifests, checksums, tensor offsets in files, and the chaining of versions.

A version's digest covers its entire manifest, including the checksums of all patches and tensors. A delta identifies
its base by digest as well as by number, so deltas cannot be chained incorrectly.

Rules for chains of versions
1. A version is full if it is the first one after a start, after an engine joins, or after a failure. In addition, at
   least every `every`-th version is full.
2. To find the missing versions, follow bases from the target back to the local checkpoint's version or a full version.
3. A version can be deleted once every engine has loaded a newer full version.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from numpy.typing import NDArray

from slime.core.errors import ConfigError, WeightSyncError
from slime.core.files import sync_to_disk

MANIFEST = "manifest.json"
FORMAT = 1
COMPRESSION = "zstd"
_PLAIN = set("/\\\0")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a version: where its patch is stored, and the checksum of the patched tensor."""

    name: str
    """The tensor's Hugging Face name."""
    dtype: str
    """safetensors name: "BF16", "F32", ..."""
    shape: tuple[int, ...]
    num_bytes: int
    """Size of the tensor in bytes."""
    encoding: str
    """A key of `encodings.ENCODINGS`, or `encodings.RAW`."""
    file: str
    offset: int
    """Byte offset of the patch in the file."""
    size: int
    """Size of the patch in bytes."""
    patch_checksum: str
    tensor_checksum: str
    """Checksum of the full tensor in this version."""


@dataclass(frozen=True, slots=True)
class Report:
    """The tensors of a version that one sender wrote, reported to the conductor."""

    entries: tuple[Entry, ...]
    num_elements: int
    """Total number of elements in this sender's tensors."""
    num_changed: int
    """Number of elements that differ from the previous version. In a full version, all elements count."""


@dataclass(frozen=True, slots=True)
class Base:
    """The version to which a delta is applied."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a version, stored as JSON in the file `MANIFEST` of its folder."""

    version: int
    base: Base | None
    """None for a full version."""
    checksum: str
    """Checksum algorithm, one of `CHECKSUMS`."""
    whole: str
    """`whole_checksum` of all the model's tensors in this version, including unchanged ones."""
    entries: tuple[Entry, ...]
    """All tensors (full version) or the changed tensors (delta), sorted by name."""

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the manifest's content."""
        canonical = json.dumps(_plain(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def write(self, folder: Path) -> None:
        text = {**_plain(self), "digest": self.digest}
        (folder / MANIFEST).write_text(json.dumps(text, separators=(",", ":")))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the manifest of the version in `folder`. Raises `WeightSyncError` if it is missing or damaged."""
        file = folder / MANIFEST
        try:
            found = json.loads(file.read_text())
            names = [f.name for f in fields(Entry)]
            entries = tuple(_entry(dict(zip(names, row, strict=True))) for row in found["entries"])
            base = None if found["base"] is None else Base(**found["base"])
            manifest = cls(int(found["version"]), base, found["checksum"], found["whole"], entries)
            told = (found["format"], found["compression"], found["digest"])
        except OSError as error:
            raise WeightSyncError(
                f"{folder} contains no version ({error.strerror}); it was deleted or never completed"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise WeightSyncError(
                f"{file} is damaged ({type(error).__name__}: {error}); send a full version"
            ) from error
        if told != (FORMAT, COMPRESSION, manifest.digest):
            raise WeightSyncError(f"the content of {file} does not match its digest; send a full version")
        return manifest


def merged(reports: Sequence[Report]) -> Report:
    """Merges the reports of all senders and sorts entries by name. Raises `WeightSyncError` on duplicates."""
    found: dict[str, Entry] = {}
    for report in reports:
        for entry in report.entries:
            if entry.name in found:
                raise WeightSyncError(f"{entry.name} was sent twice: in {found[entry.name].file} and {entry.file}")
            found[entry.name] = entry
    return Report(
        tuple(found[name] for name in sorted(found)),
        sum(report.num_elements for report in reports),
        sum(report.num_changed for report in reports),
    )


def whole_checksum(tensors: Mapping[str, str]) -> str:
    """Combines tensor checksums into one digest. `tensors`: name -> checksum."""
    text = "\n".join(f"{name} {tensors[name]}" for name in sorted(tensors))
    return hashlib.sha256(text.encode()).hexdigest()


def tensor_checksums(entries: Iterable[Entry]) -> dict[str, str]:
    """Maps tensor names to checksums."""
    return {entry.name: entry.tensor_checksum for entry in entries}


def _plain(manifest: Manifest) -> dict[str, Any]:
    rows = [[getattr(e, f.name) for f in fields(Entry)] for e in manifest.entries]
    base = None if manifest.base is None else asdict(manifest.base)
    said = {"version": manifest.version, "base": base, "checksum": manifest.checksum, "whole": manifest.whole}
    return {"format": FORMAT, "compression": COMPRESSION, **said, "entries": rows}


def _entry(row: Mapping[str, Any]) -> Entry:
    entry = Entry(**{**row, "shape": tuple(int(n) for n in row["shape"])})
    if _PLAIN & set(entry.file) or entry.file.startswith("."):
        raise ValueError(f"the file {entry.file!r} is outside the version's folder")
    if min(entry.offset, entry.size, entry.num_bytes, *entry.shape, 0) < 0:
        raise ValueError(f"{entry.name} has a negative size")
    return entry


# Helpers for files that are complete and flushed to disk before other processes can see them.


def read_json(file: Path) -> dict[str, Any] | None:
    """Returns the JSON object in `file`, or None if the file is missing or contains anything else."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def sync_folder(folder: Path) -> None:
    """Flushes a folder and all files in it to disk."""
    for file in folder.iterdir():
        if file.is_file() and not file.is_symlink():
            sync_to_disk(file)
    sync_to_disk(folder)


Buffer = bytes | memoryview | NDArray[Any]
Checksum = Literal["xxh3-128", "blake3", "adler32"]
CHECKSUMS: tuple[str, ...] = get_args(Checksum)
"""xxh3-128 runs at memory speed. blake3 is cryptographic and requires the blake3 package. adler32 has only 32 bits."""


def checksum(name: str, data: Buffer) -> str:
    """Returns the hex digest of `data`. Raises `ConfigError` if the algorithm is unknown or its package is missing."""
    content = data if isinstance(data, bytes | memoryview) else data.data
    if name == "xxh3-128":
        import xxhash

        return xxhash.xxh3_128_hexdigest(content)
    if name == "adler32":
        return f"{zlib.adler32(content):08x}"
    if problem := missing(name):
        raise ConfigError(problem)
    import blake3

    found: str = blake3.blake3(content).hexdigest()
    return found


def missing(name: str) -> str | None:
    """Returns an error message if this machine cannot compute a checksum, else None."""
    if name not in CHECKSUMS:
        return f"unknown checksum {name}; use one of {', '.join(CHECKSUMS)}"
    if name == "blake3" and importlib.util.find_spec("blake3") is None:
        return "--update-weight-delta-checksum blake3 needs the blake3 package: pip install blake3, or use xxh3-128"
    return None


WIDTHS = {"64": 8, "32": 4, "16": 2, "8_": 1, "8": 1, "OL": 1}
"""Bytes per element. Keys: the start of a safetensors dtype's name after stripping its leading letters."""
_HEAD = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100 * 1024**2


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's location in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Byte offset in the file."""
    num_bytes: int


def places(file: Path) -> dict[str, Place]:
    """Maps each tensor in a file to its location. Raises `WeightSyncError` if the file is not safetensors."""
    try:
        with file.open("rb") as opened:
            (length,) = _HEAD.unpack(opened.read(_HEAD.size))
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        start = _HEAD.size + length
        return {
            name: Place(
                t["dtype"], tuple(t["shape"]), start + t["data_offsets"][0], t["data_offsets"][1] - t["data_offsets"][0]
            )
            for name, t in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise WeightSyncError(f"{file} cannot be read as safetensors: {type(error).__name__}: {error}") from error


def width_of(dtype: str) -> int:
    """Returns the number of bytes per element of a safetensors dtype ("BF16", "F8_E4M3", ...)."""
    digits = dtype.lstrip("BFIUCO")
    for ends, width in WIDTHS.items():
        if digits.startswith(ends):
            return width
    return 1


WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
"""Suffixes of the weight files of a source checkpoint, which are not copied."""
_FOLDER = re.compile(r"weight_v(\d{6,})")


def folder_of(version: int) -> str:
    return f"weight_v{version:06d}"


def version_of(folder: str) -> int | None:
    """Parses a version from a folder's name. Returns None for any other name."""
    found = _FOLDER.fullmatch(folder)
    return int(found[1]) if found else None


def written_as(version: int) -> str:
    """Returns a version's temporary folder name, used while it is being written."""
    return f".{folder_of(version)}.tmp"


def add_assets(folder: Path, checkpoint: Path, put: Callable[[Path, Path], object]) -> None:
    """Calls `put(source, target)` for config and tokenizer files. Raises `WeightSyncError` if config.json is
    missing."""
    for asset in checkpoint.iterdir():
        if asset.is_file() and not asset.name.endswith(WEIGHT_SUFFIXES):
            put(asset, folder / asset.name)
    if not (folder / "config.json").exists():
        raise WeightSyncError(f"{checkpoint} has no config.json, which engines need to load weights")


def write_index(folder: Path, weight_map: Mapping[str, str], num_bytes: int) -> None:
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def is_full(*, since_full: int | None, every: int, confirmed: bool, all_known: bool) -> bool:
    """Returns whether the next version must be full.

    `since_full`: number of deltas since the last full version; None before the first one. `confirmed`: whether the
    previous sync succeeded. `all_known`: whether all engines in this sync took part in the previous one.
    """
    return since_full is None or since_full + 1 >= every or not confirmed or not all_known


def steps_to(target: Base, held: str | None, read: Callable[[int], Manifest]) -> list[Manifest]:
    """Returns the versions that bring a checkpoint to `target`, oldest first; empty if it is already there.

    `held`: digest of the checkpoint's current version, or None. The first returned version is full or applies
    to `held`. Raises `WeightSyncError` if a version is missing (raised by `read`) or has
    the wrong digest.
    """
    steps: list[Manifest] = []
    wanted: Base | None = target
    while wanted is not None and wanted.digest != held:
        manifest = read(wanted.version)
        if (manifest.version, manifest.digest) != (wanted.version, wanted.digest):
            raise WeightSyncError(
                f"the folder has version {manifest.version} ({manifest.digest[:12]}) instead of version "
                f"{wanted.version} ({wanted.digest[:12]}); the chain is broken, send a full version"
            )
        if manifest.base is not None and manifest.base.version >= manifest.version:
            raise WeightSyncError(f"version {manifest.version} must be newer than its base, {manifest.base.version}")
        steps.append(manifest)
        wanted = manifest.base
    return steps[::-1]


def prunable(folders: Iterable[str], *, newest_full: int) -> list[str]:
    """Returns the folders of versions older than `newest_full`. Every engine must have loaded `newest_full`."""
    found = {name: version for name in folders if (version := version_of(name)) is not None}
    return sorted(name for name, version in found.items() if version < newest_full)
