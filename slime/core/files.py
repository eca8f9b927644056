"""File utilities: atomic and durable writes, permissions, tokenizer files, Hugging Face hub names, a run's images."""

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
    """Like `replace_bytes`, but writes UTF-8 text."""
    replace_bytes(path, text.encode(), durable=durable)


def replace_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Writes a file atomically: readers see either the old or the new content, even after a crash.

    `durable`: sync the content to disk before returning. The file name is durable only after `sync_to_disk` is called
    on the folder.
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
    """Converts disk-full errors in the block to `DiskFull` with `folder` and its free space in the message."""
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not full and not re.search(r"\bos error (28|122)\b", str(error)):  # safetensors reports the number as text
            raise
        there = next(place for place in (folder, *folder.resolve().parents) if place.exists())
        space = os.statvfs(there)
        free = f"{space.f_bavail * space.f_frsize / 2**30:.2f} GiB and {space.f_favail:,} files are free"
        raise DiskFull(
            f"cannot write to {folder} because its disk or quota is full ({free}; {error}); free up space or choose a "
            "folder on another disk"
        ) from error


def write_json(path: Path, value: Any, *, durable: bool = True, indent: int | None = None) -> None:
    """Writes JSON atomically. `durable`: sync the content and the file name to disk before returning."""
    replace_text(path, json.dumps(value, indent=indent), durable=durable)
    if durable:
        sync_to_disk(path.parent)


def read_checkpoint_json(path: Path, *, or_else: str = "load another checkpoint") -> dict[str, Any]:
    """Reads a JSON object written by slime or a library. Raises `CheckpointError` with the advice `or_else`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is missing or damaged ({error}); {or_else}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} contains a {type(value).__name__} instead of a JSON object; {or_else}")
    return value


def sync_to_disk(path: Path) -> None:
    """Calls fsync on a file, or on a folder to make its entries durable. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tail_of(path: Path, num_bytes: int, start: int = 0) -> str:
    """Returns the last `num_bytes` of a log as text, starting no earlier than offset `start`. Raises `OSError`."""
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - num_bytes))
        return file.read().decode(errors="replace")


def open_to_readers(path: Path) -> None:
    """Sets a file's mode to the default under this process's umask, because safetensors creates files with 0600."""
    umask = int(fields_of(os.getpid()).get("Umask", "077"), 8)  # `os.umask` cannot read the umask without changing it
    os.chmod(path, 0o666 & ~umask)


CONFIG, FAST = "tokenizer_config.json", "tokenizer.json"
"""Files of a tokenizer: its config and the fast tokenizer."""


def is_code(folder: Path) -> bool:
    path = folder / CONFIG
    if not path.is_file() or (folder / FAST).is_file():
        return False
    auto_map = json.loads(path.read_text()).get("auto_map") or {}
    return not isinstance(auto_map, Mapping) or "AutoTokenizer" in auto_map


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = (".jsonl", ".zst", ".parquet", ".json", ".csv", ".txt", ".yaml", ".py")


def download_hint(name: str, *, dataset: bool = False) -> str:
    """Returns download instructions if `name` looks like a Hugging Face hub name (`Qwen/Qwen3-0.6B`), else "".

    A path inside an existing folder or with a file suffix is not treated as a hub name. Does not download anything.
    """
    if not _NAME.fullmatch(name) or name.endswith(_FILES) or Path(name).parent.exists():
        return ""
    what, folder = f"{name} --repo-type dataset" if dataset else name, name.partition("/")[2]
    return f"download it from the hub first: hf download {what} --local-dir {folder}, then use {folder}"


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """A run's images: immutable PNG files, each named by the digest of its bytes.

    Samples, batches and checkpoints refer to images by digest, so each image is stored only once. Engine clients and
    trainers read the bytes from the file.
    """

    folder: Path

    @classmethod
    def of_run(cls, run_dir: str) -> ImageFolder:
        return cls(Path(run_dir) / "images")

    def put(self, png: bytes) -> str:
        """Stores an image and returns its digest (32 hex digits)."""
        digest = hashlib.sha256(png).hexdigest()[:32]
        file = self._file(digest)
        if not file.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_bytes(file, png, durable=False)  # not durable, because it can be recreated from the dataset
        return digest

    def read(self, digest: str) -> bytes:
        """Returns an image's bytes. Raises `DataError` if it is missing."""
        try:
            return self._file(digest).read_bytes()
        except OSError as error:
            raise DataError(
                f"image {digest} of a sample is missing from {self.folder} ({error}); the run folder must be readable "
                "on every host, and the run must use the dataset that the sample came from"
            ) from error

    def _file(self, digest: str) -> Path:
        return self.folder / f"{digest}.png"
