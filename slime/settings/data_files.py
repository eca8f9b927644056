"""Resolves the name of a dataset to its files or data scheme, and counts its rows.

A name is a file, a folder, a glob, or a scheme with arguments (`rg:spell_backward?size=500`, see `slime.data.schemes`),
optionally followed by a slice of rows, `@[a:b]`. zstandard and pyarrow are imported only when a file needs them.

Invariants
1. Files of a folder or glob are read in lexicographic order of their paths; a slice indexes the rows of all files.
2. A folder holds one split in one format. A folder that may contain duplicate or held-out rows is refused.
"""

from __future__ import annotations

import contextlib
import glob
import io
import json
import re
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError
from slime.core.files import download_hint
from slime.core.registry import load_object

SCHEMES = "slime.data.schemes:SCHEMES"
"""Import path of the data scheme registry, because the import contract forbids importing it directly."""
ENDINGS = (".jsonl", ".jsonl.zst", ".parquet")
"""File name suffixes of readable data files."""

_SCHEME = re.compile(r"^(?P<name>[a-z][a-z0-9_]*):(?P<rest>.+)$", re.DOTALL)
_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
_SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
_SPLITS |= dict.fromkeys(("eval", "heldout"), "eval")
"""Word in a file name -> split."""
_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


def split_slice(spec: str) -> tuple[Path, slice]:
    """Splits `data.jsonl@[10:-5]` into path and slice; no slice means all rows.

    Raises `ConfigError` if the text after `@[` is not a slice of integers.
    """
    found = _SLICE.match(spec)
    if found is None:
        if "@[" in spec:
            raise ConfigError(f"{spec!r} has no valid slice; write @[start:stop] with integers, or drop it")
        return Path(spec), slice(None)
    try:
        start, stop = (int(found[part]) if found[part] else None for part in ("start", "stop"))
    except ValueError as error:
        raise ConfigError(f"{spec!r} has no valid slice; write @[start:stop] with integers, or drop it") from error
    return Path(found["path"]), slice(start, stop)


def open_lines(path: Path) -> Generator[bytes]:
    """Yields the lines of a text file, decompressed if its name ends in .zst. Raises `OSError` or zstandard's error."""
    if path.suffix != ".zst":
        with path.open("rb") as file:
            yield from file
        return
    import zstandard

    with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream:
        yield from io.BufferedReader(stream)


def split_spec(spec: str) -> tuple[str, slice]:
    """Splits a name like `split_slice`, but returns the name as written instead of a `Path`."""
    _, rows = split_slice(spec)
    return (_SLICE.match(spec) or {"path": spec})["path"], rows


def scheme_of(spec: str) -> tuple[Any, str] | None:
    """Returns the scheme and the text after its colon; None for a file, even if its name contains a colon.

    Raises `ConfigError` for an unknown scheme.
    """
    name, _ = split_spec(spec)
    found = _SCHEME.match(name)
    if found is None or Path(name).exists():
        return None
    if found["rest"].startswith("//"):
        raise ConfigError(f"{name} is a URL; download the file and pass its path")
    return load_object(SCHEMES).get(found["name"])(), found["rest"]


def grader_of_data(spec: str | None) -> str | None:
    """Returns the name of the scheme's grader; None for files and unknown schemes."""
    try:
        found = None if spec is None else scheme_of(spec)
    except ConfigError:  # a rule reports the problem
        return None
    grader: str | None = None if found is None else found[0].grader
    return grader


def files_of(spec: str) -> list[Path]:
    """Returns the files that `spec` names, in reading order. `spec` must not name a scheme.

    Raises `ConfigError` if there are none, or if a folder holds more than one split or format.
    """
    name, _ = split_spec(spec)
    path = Path(name)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _files_in(path)
    found = sorted(Path(p) for p in glob.glob(name, recursive=True) if Path(p).is_file())
    if glob.has_magic(name) and not found:
        raise ConfigError(f"{name} matches no files; correct the pattern")
    if path.exists():
        raise ConfigError(f"{name} is a pipe or a device; write the rows to a .jsonl or .parquet file")
    if not found:
        what_to_do = download_hint(name, dataset=True) or "pass a .jsonl or .parquet file"
        raise ConfigError(f"{name} does not exist; {what_to_do}")
    return found


def _files_in(folder: Path) -> list[Path]:
    """Returns the data files. Raises `ConfigError` for a folder with several splits or formats, or without data."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name.endswith(ENDINGS))
    if not files:
        below = sorted({p.parent for p in folder.rglob("*") if p.name.endswith(ENDINGS)})
        where = f"pass one of {', '.join(map(str, below[:4]))}" if below else "put .jsonl or .parquet files into it"
        raise ConfigError(f"folder {folder} has no {', '.join(ENDINGS)} file; {where}")
    of_split: dict[str, Path] = {}
    for file in files:
        of_split.setdefault(_split_of(file), file)
    if len(of_split) > 1 and set(of_split) != {"train", ""}:
        named = ", ".join(f"{split or 'unnamed'}: {file.name}" for split, file in sorted(of_split.items()))
        wanted = of_split.get("train") or of_split.get("") or files[0]
        before, train, _ = wanted.name.partition("train")
        pattern = f"{before}train*" if train else wanted.name
        raise ConfigError(
            f"folder {folder} has files of several splits ({named}), which would be read as one; use a pattern: "
            f"'{folder}/{pattern}'"
        )
    endings = sorted({next(e for e in ENDINGS if p.name.endswith(e)) for p in files})
    if len(endings) > 1:
        raise ConfigError(
            f"folder {folder} has files that end in {' and '.join(endings)}, which may contain the same rows; use a "
            f"pattern: '{folder}/*{endings[0]}'"
        )
    return files


def _split_of(file: Path) -> str:
    """Returns the first split named in a file name (`gsm8k_test.jsonl` -> `test`), or an empty string."""
    return next((_SPLITS[word] for word in re.findall(r"[a-z]+", file.name.lower()) if word in _SPLITS), "")


def check_data(spec: str, *, held_out: bool) -> None:
    """Raises `ConfigError` if the dataset does not exist. Does not open files."""
    found = scheme_of(spec)
    if found is None:
        files_of(spec)
    else:
        found[0].check(found[1], held_out=held_out)


def count_file_rows(path: Path) -> int:
    """Counts the non-empty rows of one file. Raises `OSError`, or an error of pyarrow or zstandard."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        return int(parquet.read_metadata(path).num_rows)
    return sum(1 for line in open_lines(path) if line.strip())


def count_rows(spec: str) -> int:
    """Counts the rows of a dataset, or of its slice, before any filter.

    Raises `ConfigError` if a file is missing or cannot be read, or if the scheme has no such dataset.
    """
    _, rows = split_spec(spec)
    found = scheme_of(spec)
    if found is not None:
        return len(range(*rows.indices(found[0].count(found[1]))))
    total = 0
    for path in files_of(spec):
        try:
            total += count_file_rows(path)
        except Exception as error:  # zstandard and pyarrow raise their own errors
            text = f"{type(error).__name__}: {error}"
            raise ConfigError(f"--prompt-data {path} cannot be read: {text}") from error
    return len(range(*rows.indices(total)))


def first_row_names(spec: str, key: str) -> bool:
    """Returns whether the text of the first row contains `key`.

    Returns True if the row cannot be read, and False for a scheme, because its rows do not name a grader.
    """
    try:
        if scheme_of(spec) is not None:
            return False
        path = files_of(spec)[0]
    except ConfigError:
        return True
    try:
        stat = path.stat()
        return f'"{key}"' in _first_row(path, stat.st_mtime_ns, stat.st_size)
    except Exception:  # zstandard and pyarrow raise their own errors; reading the data reports the problem
        return True


@cache
def _first_row(path: Path, _changed_ns: int, _size: int) -> str:
    """Returns the first row as JSON text. Backslashes are removed, so keys in a column of JSON text are found too."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        with parquet.ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=1), None)
        text = "" if batch is None else json.dumps(batch.to_pylist(), default=str)
    else:
        with contextlib.closing(open_lines(path)) as lines:
            text = next((line for line in lines if line.strip()), b"").decode("utf-8", "replace")
    return text.replace("\\", "")
