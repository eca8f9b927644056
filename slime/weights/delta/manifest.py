"""What a version consists of: one JSON file beside its files, and the digest that stands for all of it.

The digest covers everything that the manifest says, and that includes checksums of every patch and every tensor: who
knows the digest of a version knows its weights. A delta names the digest of its base, so a chain cannot be put together
wrongly.

Every sender makes entries for the tensors that it sends; `merged` is their union, whatever the number of senders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from slime.core.errors import WeightSyncError

MANIFEST = "manifest.json"
FORMAT = 1
COMPRESSION = "zstd"
_PLAIN = set("/\\\0")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a version: where its patch lies, and what comes of it."""

    name: str
    """Hugging Face name."""
    dtype: str
    """As safetensors writes it: "BF16", "F32", ..."""
    shape: tuple[int, ...]
    num_bytes: int
    """Of the tensor."""
    encoding: str
    """Of `delta.encodings`, or `RAW`."""
    file: str
    """In the folder of the version."""
    offset: int
    """Of the patch in the file, in bytes."""
    size: int
    """Of the patch, in bytes."""
    patch_checksum: str
    tensor_checksum: str
    """Of the whole tensor as it is in this version."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one sender wrote of a version; travels to the rank that completes it."""

    entries: tuple[Entry, ...]
    num_elements: int
    """Of all tensors that it sends."""
    num_changed: int
    """Elements that are not as in the version before; all of them in a full version."""


@dataclass(frozen=True, slots=True)
class Base:
    """The version that a delta is one of."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version."""

    version: int
    base: Base | None
    """None: a full version."""
    checksum: str
    """How checksums are computed, by name."""
    whole: str
    """`whole_checksum` of all tensors of the model in this version, those that did not change among them."""
    entries: tuple[Entry, ...]
    """All tensors of a full version, those that changed of a delta; by name."""

    @property
    def digest(self) -> str:
        """Hex SHA-256 of what the manifest says."""
        return hashlib.sha256(_canonical(self)).hexdigest()

    def write(self, folder: Path) -> None:
        """Writes it as `MANIFEST`."""
        text = {**_plain(self), "digest": self.digest}
        (folder / MANIFEST).write_text(json.dumps(text, separators=(",", ":")))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of the version in `folder`. Raises `WeightSyncError` if it is not there, or not whole."""
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
                f"got no version in {folder}: {error.strerror}; it was pruned, or never whole"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise WeightSyncError(
                f"got a damaged {file} ({type(error).__name__}: {error}); send a full version"
            ) from error
        if told != (FORMAT, COMPRESSION, manifest.digest):
            raise WeightSyncError(f"got {file}, whose content is not that of its digest; send a full version")
        return manifest


def merged(reports: Sequence[Report]) -> Report:
    """What all senders wrote, entries by name. Raises `WeightSyncError` for a tensor that two of them sent."""
    found: dict[str, Entry] = {}
    for report in reports:
        for entry in report.entries:
            if entry.name in found:
                raise WeightSyncError(f"got {entry.name} in {found[entry.name].file} and in {entry.file}; send it once")
            found[entry.name] = entry
    return Report(
        tuple(found[name] for name in sorted(found)),
        sum(report.num_elements for report in reports),
        sum(report.num_changed for report in reports),
    )


def whole_checksum(tensors: Mapping[str, str]) -> str:
    """One digest of many: name of a tensor -> its checksum."""
    text = "\n".join(f"{name} {tensors[name]}" for name in sorted(tensors))
    return hashlib.sha256(text.encode()).hexdigest()


def tensor_checksums(entries: Iterable[Entry]) -> dict[str, str]:
    """Name -> checksum of the tensor."""
    return {entry.name: entry.tensor_checksum for entry in entries}


def _plain(manifest: Manifest) -> dict[str, Any]:
    rows = [[getattr(e, f.name) for f in fields(Entry)] for e in manifest.entries]
    base = None if manifest.base is None else asdict(manifest.base)
    said = {"version": manifest.version, "base": base, "checksum": manifest.checksum, "whole": manifest.whole}
    return {"format": FORMAT, "compression": COMPRESSION, **said, "entries": rows}


def _canonical(manifest: Manifest) -> bytes:
    return json.dumps(_plain(manifest), sort_keys=True, separators=(",", ":")).encode()


def _entry(row: Mapping[str, Any]) -> Entry:
    entry = Entry(**{**row, "shape": tuple(int(n) for n in row["shape"])})
    if _PLAIN & set(entry.file) or entry.file.startswith("."):
        raise ValueError(f"the file {entry.file!r} would be outside of the version")
    if min(entry.offset, entry.size, entry.num_bytes, *entry.shape, 0) < 0:
        raise ValueError(f"{entry.name} has a negative size")
    return entry
