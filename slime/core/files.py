"""What slime writes and finds on disk: durable files, their permissions, the files of a tokenizer, names on the hub
where a path is meant, and the images of a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slime.core.errors import DataError

# Files that are on disk: what was written to them survives a host that stops.


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Writes a file that is the old one or the new one, whatever happens. `durable`: it is on disk when this returns;
    its name is once `sync_to_disk` has returned for its folder.
    """
    replace_bytes(path, text.encode(), durable=durable)


def replace_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """`replace_text` of bytes."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        if durable:
            sync_to_disk(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sync_to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Permissions of files that a library wrote through a private temporary file.

_STATUS = Path("/proc/self/status")


def open_to_readers(path: Path) -> None:
    """Gives a file the mode that an ordinary one of this process has, by its umask: safetensors leaves 0600."""
    os.chmod(path, 0o666 & ~_umask())


def _umask() -> int:
    """Of this process. `os.umask` would have to change it to tell, for every thread."""
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Umask":
            return int(value, 8)
    return 0o077


# What the files of a checkpoint's tokenizer are called, and whether they are code.

CONFIG, FAST = "tokenizer_config.json", "tokenizer.json"


def is_code(folder: Path) -> bool:
    """Whether the tokenizer of a checkpoint is Python code of its own, and nothing else."""
    path = folder / CONFIG
    if not path.is_file() or (folder / FAST).is_file():
        return False
    auto_map = json.loads(path.read_text()).get("auto_map") or {}
    return not isinstance(auto_map, Mapping) or "AutoTokenizer" in auto_map


# Names on the Hugging Face hub where a path is meant: nothing is downloaded, but the command is named.

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = (".jsonl", ".zst", ".parquet", ".json", ".csv", ".txt", ".yaml", ".py")


def download_hint(name: str, *, dataset: bool = False) -> str:
    """What to do about a path that does not exist, if it may be a name on the hub (`Qwen/Qwen3-0.6B`); else empty.

    A path below a folder that exists is none, nor is one that ends like a file.
    """
    if not _NAME.fullmatch(name) or name.endswith(_FILES) or Path(name).parent.exists():
        return ""
    what, folder = f"{name} --repo-type dataset" if dataset else name, name.partition("/")[2]
    return f"a name on the hub is downloaded first: hf download {what} --local-dir {folder}, then give {folder}"


# The images of a run: files in a folder of it, named by what is in them.
#
# A prompt's samples name its images by digest; whoever needs the bytes, a client that sends them or a trainer that
# looks at them, reads the file. So an image is kept once, whatever number of samples, batches and checkpoints speak of
# it.
#
# Invariants
# 1. A file does not change: its name is the digest of its bytes. It appears whole.

FOLDER = "images"
"""Below the run's folder."""


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Images by digest, all as PNG files."""

    folder: Path

    @classmethod
    def of_run(cls, run_dir: str) -> ImageFolder:
        """That of a run."""
        return cls(Path(run_dir) / FOLDER)

    def put(self, png: bytes) -> str:
        """Keeps an image; returns its digest, 32 hex digits."""
        digest = hashlib.sha256(png).hexdigest()[:32]
        file = self._file(digest)
        if not file.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_bytes(file, png, durable=False)  # the data set has it, too
        return digest

    def read(self, digest: str) -> bytes:
        """Raises `DataError` if it is not there."""
        try:
            return self._file(digest).read_bytes()
        except OSError as error:
            raise DataError(
                f"got a sample with the image {digest}, which {self.folder} does not hold ({error}); do: let every "
                "host see the folder of the run, and begin with the data set that the sample was made from"
            ) from error

    def _file(self, digest: str) -> Path:
        return self.folder / f"{digest}.png"
