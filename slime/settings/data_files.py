"""What a data set's name means, and how many rows it has: shared by the command line and by the room that reads data.

Light: decompressors and parquet are imported only when such a file is counted or read.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

from slime.core.errors import ConfigError

_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


def split_slice(spec: str) -> tuple[Path, slice]:
    """`data.jsonl@[10:-5]` -> path and slice (the whole file without one). Raises `ConfigError` on another `@[...]`."""
    found = _SLICE.match(spec)
    if found is None:
        if "@[" in spec:
            raise ConfigError(
                f"got {spec!r}, because a slice reads @[start:stop] with integers; do: correct or drop it"
            )
        return Path(spec), slice(None)
    try:
        start, stop = (int(found[part]) if found[part] else None for part in ("start", "stop"))
    except ValueError as error:
        raise ConfigError(f"got {spec!r}, whose slice is not two integers; do: write @[start:stop]") from error
    return Path(found["path"]), slice(start, stop)


def open_lines(path: Path) -> Iterator[bytes]:
    """The lines of a text file, decompressed if its name ends in .zst. Errors are those of the file system or zstd."""
    if path.suffix != ".zst":
        with path.open("rb") as file:
            yield from file
        return
    import zstandard

    with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream:
        yield from io.BufferedReader(stream)


def count_rows(spec: str) -> int:
    """Rows of a .jsonl, .jsonl.zst or .parquet file with an optional `@[a:b]`, before any filter.

    Raises `ConfigError` for a file that is missing or cannot be read.
    """
    path, rows = split_slice(spec)
    if not path.is_file():
        raise ConfigError(f"got --prompt-data {path}, which does not exist; give a .jsonl or .parquet file")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            total = int(parquet.read_metadata(path).num_rows)
        else:
            total = sum(1 for line in open_lines(path) if line.strip())
    except Exception as error:  # zstandard and pyarrow raise their own kinds
        raise ConfigError(f"got --prompt-data {path}, which cannot be read: {type(error).__name__}: {error}") from error
    return len(range(*rows.indices(total)))


def first_row_names(spec: str, key: str) -> bool:
    """Whether the first row of a data set holds `key`, by its text; assumed where that cannot be read."""
    path, _ = split_slice(spec)
    if path.suffix != ".jsonl" or not path.is_file():
        return True
    with path.open(encoding="utf-8", errors="replace") as lines:
        return f'"{key}"' in lines.readline()
