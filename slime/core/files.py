"""Files on disk: atomic and durable writes, permissions, tokenizer files, names on the hub, images of a run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core.confine.view import fields_of
from slime.core.errors import CheckpointError, DataError, DiskFull


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Does the same as `replace_bytes` for text in UTF-8."""
    replace_bytes(path, text.encode(), durable=durable)


def replace_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Writes a file atomically: a reader sees the old content or the new, even after a crash.

    `durable`: whether the content is on disk when this returns. The name is on disk only after `sync_to_disk` of the
    folder.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with full_disk_named(path.parent):
            partial.write_bytes(content)
            if durable:
                sync_to_disk(partial)
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Turns the error of a full disk in the block into `DiskFull`, which names `folder` and its free space."""
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not full and not re.search(r"\bos error (28|122)\b", str(error)):  # safetensors has the number in its text
            raise
        there = next(place for place in (folder, *folder.resolve().parents) if place.exists())
        space = os.statvfs(there)
        free = f"{space.f_bavail * space.f_frsize / 2**30:.2f} GiB and {space.f_favail:,} files are free"
        raise DiskFull(
            f"cannot write below {folder}, because its disk or quota is full ({free}; {error}); make room there, or "
            "choose a folder on another disk"
        ) from error


def write_json(path: Path, value: Any, *, durable: bool = True, indent: int | None = None) -> None:
    """Writes JSON atomically. `durable`: whether content and name are on disk when this returns."""
    replace_text(path, json.dumps(value, indent=indent), durable=durable)
    if durable:
        sync_to_disk(path.parent)


def read_checkpoint_json(path: Path, *, or_else: str = "load another checkpoint") -> dict[str, Any]:
    """Reads a JSON object that slime or a library wrote. Raises `CheckpointError`, with the advice `or_else`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is missing or damaged ({error}); {or_else}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} contains a {type(value).__name__} instead of a JSON object; {or_else}")
    return value


def sync_to_disk(path: Path) -> None:
    """Waits until a file's content, or the names in a folder, are on disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tail_of(path: Path, num_bytes: int, start: int = 0) -> str:
    """Returns the last `num_bytes` of a log as text, but nothing before offset `start`. Raises `OSError`."""
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - num_bytes))
        return file.read().decode(errors="replace")


def open_to_readers(path: Path) -> None:
    """Gives a file the default mode under this process's umask, because safetensors creates files with 0600."""
    umask = int(fields_of(os.getpid()).get("Umask", "077"), 8)  # `os.umask` can only read it by changing it
    os.chmod(path, 0o666 & ~umask)


CONFIG, FAST = "tokenizer_config.json", "tokenizer.json"
"""The files of a tokenizer: its settings, and the fast tokenizer."""


def is_code(folder: Path) -> bool:
    path = folder / CONFIG
    if not path.is_file() or (folder / FAST).is_file():
        return False
    auto_map = json.loads(path.read_text()).get("auto_map") or {}
    return not isinstance(auto_map, Mapping) or "AutoTokenizer" in auto_map


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = (".jsonl", ".zst", ".parquet", ".json", ".csv", ".txt", ".yaml", ".py")


def download_hint(name: str, *, dataset: bool = False) -> str:
    """Returns how to download `name` if it looks like a name on the Hugging Face hub (`Qwen/Qwen3-0.6B`), else "".

    A path below an existing folder, or with a file suffix, is not a hub name. Downloads nothing.
    """
    if not _NAME.fullmatch(name) or name.endswith(_FILES) or Path(name).parent.exists():
        return ""
    what, folder = f"{name} --repo-type dataset" if dataset else name, name.partition("/")[2]
    return f"a name on the hub is downloaded first: hf download {what} --local-dir {folder}, then use {folder}"


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """The images of a run: immutable PNG files, named by the digest of their bytes.

    Samples, batches and checkpoints refer to images by digest, so each image is stored once. A client or trainer that
    needs the bytes reads the file.
    """

    folder: Path

    @classmethod
    def of_run(cls, run_dir: str) -> ImageFolder:
        return cls(Path(run_dir) / "images")

    def put(self, png: bytes) -> str:
        """Stores an image; returns its digest, 32 hex digits."""
        digest = hashlib.sha256(png).hexdigest()[:32]
        file = self._file(digest)
        if not file.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_bytes(file, png, durable=False)  # after a crash the dataset still has the image
        return digest

    def read(self, digest: str) -> bytes:
        """Returns the bytes of an image. Raises `DataError` if it is missing."""
        try:
            return self._file(digest).read_bytes()
        except OSError as error:
            raise DataError(
                f"{self.folder} has no image {digest}, which a sample needs ({error}); every host must see the folder "
                "of the run, and the run must use the dataset that the sample came from"
            ) from error

    def _file(self, digest: str) -> Path:
        return self.folder / f"{digest}.png"
