"""The images of a run: files in a folder of it, named by what is in them.

A prompt's samples name its images by digest; whoever needs the bytes, a client that sends them or a trainer that looks
at them, reads the file. So an image is kept once, whatever number of samples, batches and checkpoints speak of it.

Invariants
1. A file does not change: its name is the digest of its bytes. It appears whole.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from slime.core.durable import replace_bytes
from slime.core.errors import DataError

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
