"""Reads the raw rows of a dataset from jsonl (plain or .zst) or parquet files, or a scheme. Supports slices, `@[a:b]`.

Invariants
1. A slice counts all rows (non-blank lines) across all files, usable or not. Negative indices count from the end.
2. Every selected row is yielded exactly once, as a value or as an error.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from slime.core.errors import ConfigError, DataError
from slime.settings.data_files import count_file_rows, files_of, open_lines, scheme_of, split_spec


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row: its value, or why it could not be read."""

    file: str
    """Name of the file, or the scheme with its arguments."""
    line: int
    """1-based line of a text file, or row of a parquet file or scheme."""
    value: dict[str, Any] | None
    error: str | None = None


def read_rows(spec: str, *, held_out: bool = False) -> Iterator[RawRow]:
    """Yields the rows of a dataset or slice (`slime.settings.data_files`), in order.

    `held_out`: the rows are not for training (only schemes use this). Raises `ConfigError` for an unknown name or file
    type, `DataError` for a damaged file.
    """
    name, rows = split_spec(spec)
    found = scheme_of(spec)
    if found is None:
        yield from _read_files(files_of(spec), rows)
        return
    scheme, rest = found
    start, stop, _ = rows.indices(scheme.count(rest))
    made = itertools.islice(enumerate(scheme.rows(rest, held_out=held_out), start=1), start, max(start, stop))
    yield from (RawRow(name, number, dict(value)) for number, value in made)


def _read_files(files: list[Path], rows: slice) -> Iterator[RawRow]:
    """Yields the rows of a slice that counts rows across all files."""
    if len(files) == 1 or rows == slice(None):
        for path in files:
            yield from _read_file(path, rows)
        return
    try:
        sizes = [count_file_rows(path) for path in files]
    except Exception as error:  # zstandard and pyarrow raise their own exception types
        raise DataError(f"{files[0].parent} cannot be read: {type(error).__name__}: {error}") from error
    start, stop, _ = rows.indices(sum(sizes))
    for path, size in zip(files, sizes, strict=True):
        low, high = max(start, 0), min(stop, size)
        if low < high:
            yield from _read_file(path, slice(low, high))
        start, stop = start - size, stop - size


def _read_file(path: Path, rows: slice) -> Iterator[RawRow]:
    if path.suffix == ".parquet":
        return _read_parquet(path, rows)
    if path.suffixes[-1:] == [".jsonl"] or path.suffixes[-2:] == [".jsonl", ".zst"]:
        return _read_jsonl(path, rows)
    raise ConfigError(f"slime cannot read the dataset {path.name}; pass a .jsonl, .jsonl.zst or .parquet file")


def _read_jsonl(path: Path, rows: slice) -> Iterator[RawRow]:
    lines = ((n, text) for n, text in enumerate(open_lines(path), start=1) if text.strip())
    from_the_start = all(bound is None or bound >= 0 for bound in (rows.start, rows.stop))
    try:  # without negative indices, only the file up to the end of the slice is read
        for n, text in itertools.islice(lines, rows.start, rows.stop) if from_the_start else list(lines)[rows]:
            yield _parse_line(path.name, n, text)
    except Exception as error:  # zstandard raises its own exception types
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _parse_line(file: str, line: int, text: bytes) -> RawRow:
    try:
        value = json.loads(text.decode("utf-8-sig" if line == 1 else "utf-8"), parse_constant=_refuse_constant)
        if b"\\u" in text:  # reject lone surrogates, which no tokenizer can encode
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        return RawRow(file, line, None, f"not valid JSON: {error}")
    if not isinstance(value, dict):
        return RawRow(file, line, None, f"the row must be a JSON object, got {type(value).__name__}")
    return RawRow(file, line, value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed in JSON")


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
                    yield RawRow(path.name, first + low + i + 1, value)
            first += batch.num_rows
            if first >= stop:
                return
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
