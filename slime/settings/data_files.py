"""What a data set's name means, and how many rows it has: for the command line and for the room that reads data.

A name is a file, a folder, a glob of files, or a scheme's data (`rg:spell_backward?size=500`, `slime.data.schemes`).
Each may end in a slice of its rows, `@[a:b]`. Decompressors and parquet are imported only when such a file is read.

Invariants
1. The files of a folder or glob are read in the order of their paths, as text; a slice counts the rows of all of them.
2. A folder is one split in one format. A folder that may hold rows twice, or held-out rows, is refused.
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
"""The registry of data schemes; it is in a room above the settings."""
ENDINGS = (".jsonl", ".jsonl.zst", ".parquet")
"""Endings of readable files."""

_SCHEME = re.compile(r"^(?P<name>[a-z][a-z0-9_]*):(?P<rest>.+)$", re.DOTALL)
_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
"""Word in a file's name -> the split it names."""
_SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
_SPLITS |= dict.fromkeys(("eval", "heldout"), "eval")
"""Word of a file's name -> the split that it says."""
_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


def split_slice(spec: str) -> tuple[Path, slice]:
    """`data.jsonl@[10:-5]` -> path and slice (without one: the whole file). Raises `ConfigError` for other `@[...]`."""
    found = _SLICE.match(spec)
    if found is None:
        if "@[" in spec:
            raise ConfigError(f"got {spec!r}, but a slice is written @[start:stop] with integers; correct or drop it")
        return Path(spec), slice(None)
    try:
        start, stop = (int(found[part]) if found[part] else None for part in ("start", "stop"))
    except ValueError as error:
        raise ConfigError(f"got {spec!r}, whose slice is not two integers; write @[start:stop]") from error
    return Path(found["path"]), slice(start, stop)


def open_lines(path: Path) -> Generator[bytes]:
    """The lines of a text file, decompressed if its name ends in .zst. Raises errors of the file system or zstd."""
    if path.suffix != ".zst":
        with path.open("rb") as file:
            yield from file
        return
    import zstandard

    with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream:
        yield from io.BufferedReader(stream)


def split_spec(spec: str) -> tuple[str, slice]:
    """As `split_slice`, with the name as written."""
    _, rows = split_slice(spec)
    return (_SLICE.match(spec) or {"path": spec})["path"], rows


def scheme_of(spec: str) -> tuple[Any, str] | None:
    """The scheme of a name and the text after its colon; None for files, also files with a colon in their name.

    Raises `ConfigError` for an unknown scheme.
    """
    name, _ = split_spec(spec)
    found = _SCHEME.match(name)
    if found is None or Path(name).exists():
        return None
    if found["rest"].startswith("//"):
        raise ConfigError(f"got {name}, which is a URL; download the file, and give its path")
    return load_object(SCHEMES).get(found["name"])(), found["rest"]


def grader_of_data(spec: str | None) -> str | None:
    """The grader that comes with a scheme's data; None for files and unknown schemes."""
    try:
        found = None if spec is None else scheme_of(spec)
    except ConfigError:  # a rule reports it
        return None
    grader: str | None = None if found is None else found[0].grader
    return grader


def files_of(spec: str) -> list[Path]:
    """The files of a name that is not a scheme's, in reading order.

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
        raise ConfigError(f"got {name}, which matches no file; correct the pattern")
    if path.exists():
        raise ConfigError(f"got {name}, which is a pipe or a device; write the rows into a .jsonl or .parquet file")
    if not found:
        what_to_do = download_hint(name, dataset=True) or "give a .jsonl or .parquet file"
        raise ConfigError(f"got {name}, which does not exist; {what_to_do}")
    return found


def _files_in(folder: Path) -> list[Path]:
    """Raises `ConfigError` for a folder with several splits or formats, or without data."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name.endswith(ENDINGS))
    if not files:
        below = sorted({p.parent for p in folder.rglob("*") if p.name.endswith(ENDINGS)})
        where = f"name one of {', '.join(map(str, below[:4]))}" if below else "put .jsonl or .parquet files into it"
        raise ConfigError(f"got folder {folder}, which holds no {', '.join(ENDINGS)} file; {where}")
    of_split: dict[str, Path] = {}
    for file in files:
        of_split.setdefault(_split_of(file), file)
    if len(of_split) > 1 and set(of_split) != {"train", ""}:
        named = ", ".join(f"{split or 'unnamed'}: {file.name}" for split, file in sorted(of_split.items()))
        wanted = of_split.get("train") or of_split.get("") or files[0]
        before, train, _ = wanted.name.partition("train")
        pattern = f"{before}train*" if train else wanted.name
        raise ConfigError(
            f"got folder {folder} with files of several splits ({named}), which would be read as one; give a "
            f"pattern: '{folder}/{pattern}'"
        )
    endings = sorted({next(e for e in ENDINGS if p.name.endswith(e)) for p in files})
    if len(endings) > 1:
        raise ConfigError(
            f"got folder {folder} with files that end in {' and '.join(endings)} and may hold the same rows; "
            f"give a pattern: '{folder}/*{endings[0]}'"
        )
    return files


def _split_of(file: Path) -> str:
    """The split named by the first such word in a file name (`gsm8k_test.jsonl`); empty without one."""
    return next((_SPLITS[word] for word in re.findall(r"[a-z]+", file.name.lower()) if word in _SPLITS), "")


def check_data(spec: str, *, held_out: bool) -> None:
    """Raises `ConfigError` for data that do not exist. Does not open files."""
    found = scheme_of(spec)
    if found is None:
        files_of(spec)
    else:
        found[0].check(found[1], held_out=held_out)


def count_file_rows(path: Path) -> int:
    """Raises what the file's reader raises."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        return int(parquet.read_metadata(path).num_rows)
    return sum(1 for line in open_lines(path) if line.strip())


def count_rows(spec: str) -> int:
    """Rows of a data set or of its slice, before any filter.

    Raises `ConfigError` for a file that is missing or cannot be read, and for a scheme's unknown name.
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
            raise ConfigError(f"got --prompt-data {path}, which cannot be read: {text}") from error
    return len(range(*rows.indices(total)))


def first_row_names(spec: str, key: str) -> bool:
    """Whether the text of the first row holds `key`; True if that row cannot be read. False for a scheme, whose rows
    name no grader.
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
    except Exception:  # zstandard and pyarrow raise their own errors; reading the data reports it
        return True


@cache
def _first_row(path: Path, _changed_ns: int, _size: int) -> str:
    """The first row as JSON text, without the backslashes of a column that holds JSON itself."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        with parquet.ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=1), None)
        text = "" if batch is None else json.dumps(batch.to_pylist(), default=str)
    else:
        with contextlib.closing(open_lines(path)) as lines:
            text = next((line for line in lines if line.strip()), b"").decode("utf-8", "replace")
    return text.replace("\\", "")
