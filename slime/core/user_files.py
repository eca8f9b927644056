"""Reads user-provided settings files (YAML or JSON with a top-level mapping).

Invariants
1. Every problem with a file becomes a single `ConfigError` that names it. No file content causes a traceback.
2. Duplicate keys are rejected, because one of the values would be silently ignored.
3. Only regular files up to a size limit are read, because a pipe or device might never end.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.text import shorten

if TYPE_CHECKING:
    import yaml

MOST_BYTES = 16 * 2**20
"""Maximum size of a settings file. Anything larger is probably a different kind of file."""

MOST_NODES = 100_000
"""Maximum number of values in a YAML file after alias expansion. Nine short lines can expand to billions of values."""


class Doubled(ValueError):
    """A key occurs twice in one mapping. The message says which key and where."""


class Tangled(ValueError):
    """A YAML alias contains itself or expands to too many values. The message says where."""


@contextmanager
def paths_in_words() -> Iterator[None]:
    """Converts an `OSError` in the block to a `ConfigError` that names the path."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise ConfigError(path_in_words(error)) from error


def path_in_words(error: OSError) -> str:
    name = error.filename.decode(errors="replace") if isinstance(error.filename, bytes) else str(error.filename)
    return f"{shorten(name, 300)} cannot be used ({error.strerror or error}); choose another path"


def read_small(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Returns a file's content. Raises `OSError`, including for a pipe, a device, or more than `most_bytes`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # do not block on a pipe without a writer
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content


def read_text(path: str | Path, flag: str, what: str = "file") -> str:
    """Reads the text file passed to `flag`. `what`: kind of file, for messages. Raises `ConfigError`."""
    said = f"{flag} {shorten(str(path), 300)}"
    try:
        file = Path(path)
        if file.is_dir():
            raise ConfigError(f"{said} is a folder; expected a {what}")
        if not file.exists():
            raise ConfigError(f"{said} does not exist; expected a {what}")
        return read_small(file).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{said} is not text (byte {error.start} is not UTF-8); expected a {what}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{said} cannot be read ({reason}); expected a {what}") from error


def read_yaml(path: str | Path, flag: str) -> dict[str, Any]:
    """Returns the mapping in the YAML file passed to `flag`, or {} for an empty file. Raises `ConfigError`."""
    content = parse_yaml(read_text(path, flag, "YAML file"), f"{flag} {path}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        shown = shorten(repr(content), 80)
        raise ConfigError(f"{flag} {path} is {shown}, not a mapping; write `name: value` lines")
    return content


def parse_yaml(text: str, where: str) -> Any:
    """Parses YAML. `where`: source of the text, for messages. Raises `ConfigError`."""
    import yaml

    try:
        return yaml.load(text, _strict_loader())
    except Doubled as error:
        raise ConfigError(f"{where}: {error}; keep one") from error
    except Tangled as error:
        raise ConfigError(f"{where}: {error}; write the values out") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{where} is not YAML: {shorten(reason, 300)}; correct it") from error


def _strict_loader() -> type[yaml.SafeLoader]:
    import yaml

    class Strict(yaml.SafeLoader):
        """Rejects duplicate keys, except a key that overrides one merged with `<<`."""

        def get_single_node(self) -> yaml.Node | None:
            root = super().get_single_node()
            if root is not None:
                _require_tree(root, {})
            return root

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            if isinstance(node, yaml.MappingNode):
                _require_single_keys(
                    (self.construct_object(key, deep=True), key.start_mark.line + 1)
                    for key, _ in node.value
                    if key.tag != "tag:yaml.org,2002:merge"
                )
            return super().construct_mapping(node, deep)

    return Strict


def _require_tree(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Returns the number of values in `node` after alias expansion. Raises `Tangled`.

    `sizes`: node id -> count, or 0 while the node is being counted.
    """
    if (known := sizes.get(id(node))) is not None:
        if not known:
            raise Tangled(f"an alias refers to a value that contains it (line {node.start_mark.line + 1})")
        return known
    sizes[id(node)] = 0
    entries = () if isinstance(node.value, str) else node.value  # the entries of a mapping are pairs
    parts = [part for one in entries for part in (one if isinstance(one, tuple) else (one,))]
    size = 1 + sum(_require_tree(part, sizes) for part in parts)
    if size > MOST_NODES:
        raise Tangled(f"aliases expand to more than {MOST_NODES} values (line {node.start_mark.line + 1})")
    sizes[id(node)] = size
    return size


def _require_single_keys(keys: Iterable[tuple[Any, int]]) -> None:
    """Raises `Doubled` if a key occurs twice. `keys`: (key, line) pairs."""
    first: dict[str, int] = {}
    for key, line in keys:
        if repr(key) in first:
            lines = f"lines {first[repr(key)]} and {line}" if first[repr(key)] != line else f"line {line}"
            raise Doubled(f"the key {key!r} occurs twice ({lines})")
        first[repr(key)] = line


def read_json(path: str | Path, flag: str, what: str = "JSON file") -> dict[str, Any]:
    """Returns the object in the JSON file passed to `flag`. Raises `ConfigError`."""
    text = read_text(path, flag, what)
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} {path} is not JSON ({error}); correct it, or choose another file") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{flag} {path} does not contain a JSON object; expected a {what}")
    return content


def parse_json(text: str) -> Any:
    """Parses JSON. Raises `ValueError`, or its subclass `Doubled` for a duplicate key."""
    return json.loads(text, object_pairs_hook=_single)


def _single(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise Doubled(f"the key {next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return out
