"""Rows of jsonl (plain or .zst) and parquet files, with `@[a:b]` slices; what cannot be read is a row with an error.

Invariants
1. A slice counts the rows of the file (non-blank lines), good and bad alike, with Python's meaning of negatives.
2. Every selected row comes out exactly once, as a value or as the reason why not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from slime.core.errors import ConfigError, DataError
from slime.settings.data_files import open_lines


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as the file gives it: `value`, or `error` where it could not be read."""

    line: int
    """Line of a text file, row of a parquet file, from 1."""
    value: dict[str, Any] | None
    error: str | None = None


def read_rows(path: Path, rows: slice) -> Iterator[RawRow]:
    """The selected rows, in file order. Raises `ConfigError` for an unknown kind, `DataError` for a broken file."""
    if not path.is_file():
        raise DataError(f"got no file {path.resolve()}; do: correct the path of the dataset")
    if path.suffix == ".parquet":
        return _read_parquet(path, rows)
    if path.suffixes[-1:] == [".jsonl"] or path.suffixes[-2:] == [".jsonl", ".zst"]:
        return _read_jsonl(path, rows)
    raise ConfigError(f"got dataset {path.name}; give a .jsonl, .jsonl.zst or .parquet file")


def _read_jsonl(path: Path, rows: slice) -> Iterator[RawRow]:
    try:
        lines = [(n, text) for n, text in enumerate(open_lines(path), start=1) if text.strip()]
    except Exception as error:  # zstandard raises its own kinds
        raise DataError(f"got unreadable {path}: {type(error).__name__}: {error}") from error
    for n, text in lines[rows]:
        yield _parse_line(n, text)


def _parse_line(line: int, text: bytes) -> RawRow:
    try:
        value = json.loads(text.decode("utf-8-sig" if line == 1 else "utf-8"), parse_constant=_refuse_constant)
        if b"\\u" in text:  # half a surrogate pair: text that no tokenizer can encode
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        return RawRow(line, None, f"not valid JSON: {error}")
    if not isinstance(value, dict):
        return RawRow(line, None, f"got a JSON {type(value).__name__}, a row is an object")
    return RawRow(line, value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _read_parquet(path: Path, rows: slice) -> Iterator[RawRow]:
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        start, stop, _ = rows.indices(file.metadata.num_rows)
        first = 0
        for batch in file.iter_batches(batch_size=1024):
            low, high = max(start - first, 0), min(stop - first, batch.num_rows)
            if low < high:
                for i, value in enumerate(batch.slice(low, high - low).to_pylist()):
                    yield RawRow(first + low + i + 1, value)
            first += batch.num_rows
            if first >= stop:
                return
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DataError(f"got unreadable {path}: {type(error).__name__}: {error}") from error
