"""Files of settings that a user wrote or named: YAML and JSON, each one mapping.

Invariants
1. Whatever is wrong with such a file is one `ConfigError` that names it; no bytes of it make a traceback.
2. A key that stands twice is refused: one of the two values would be ignored silently.
3. Only files are read, and only so much: a pipe may never end, a device has no end.
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
"""Of a file of settings; what is larger is another file."""

MOST_NODES = 100_000
"""Values of a YAML file, with those that its aliases repeat: nine short lines can mean billions."""


class Doubled(ValueError):
    """A key stands twice in one mapping. Says which, and where."""


class Tangled(ValueError):
    """Aliases of a YAML file name what they stand in, or too much. Says which."""


@contextmanager
def paths_in_words() -> Iterator[None]:
    """What the file system says of a path that is used in the block is a `ConfigError` that names it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise ConfigError(path_in_words(error)) from error


def path_in_words(error: OSError) -> str:
    """A sentence on the path of an error."""
    name = error.filename.decode(errors="replace") if isinstance(error.filename, bytes) else str(error.filename)
    return f"got {shorten(name, 300)}, which cannot be used ({error.strerror or error}); name another"


def read_small(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """All bytes of a file. Raises `OSError`, also for a pipe, a device, and more than `most_bytes`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for its writer
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content


def read_text(path: str | Path, flag: str, what: str = "file") -> str:
    """The text of the file that `flag` names. `what`: the kind of file that is wanted. Raises `ConfigError`."""
    said = f"got {flag} {shorten(str(path), 300)}"
    try:
        file = Path(path)
        if file.is_dir():
            raise ConfigError(f"{said}, which is a folder; name a {what} in it")
        if not file.exists():
            raise ConfigError(f"{said}, which does not exist; give a {what}")
        return read_small(file).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{said}, which holds no text (byte {error.start} is not UTF-8); give a {what}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{said}, which cannot be read ({reason}); give a {what}") from error


def read_yaml(path: str | Path, flag: str) -> dict[str, Any]:
    """The mapping in the YAML file that `flag` names; empty for an empty file. Raises `ConfigError`."""
    content = parse_yaml(read_text(path, flag, "YAML file"), f"{flag} {path}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        shown = shorten(repr(content), 80)
        raise ConfigError(f"got {flag} {path}, which is not a mapping but {shown}; write `name: value` lines")
    return content


def parse_yaml(text: str, where: str) -> Any:
    """What YAML text says; `where` names it in messages. Raises `ConfigError`."""
    import yaml

    try:
        return yaml.load(text, _strict_loader())
    except Doubled as error:
        raise ConfigError(f"got {where}, in which {error}; keep one") from error
    except Tangled as error:
        raise ConfigError(f"got {where}, in which {error}; write the values out") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"got {where}, which is not YAML: {shorten(reason, 300)}; correct it") from error


def _strict_loader() -> type[yaml.SafeLoader]:
    import yaml

    class Strict(yaml.SafeLoader):
        """A safe loader that refuses a key which stands twice. What `<<` brings in may be given again."""

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
    """Values below `node`, each alias counted as what it names. Raises `Tangled`. `sizes`: what is known by id; 0 of
    those that are being counted.
    """
    if (known := sizes.get(id(node))) is not None:
        if not known:
            raise Tangled(f"an alias stands in what it names (line {node.start_mark.line + 1})")
        return known
    sizes[id(node)] = 0
    entries = () if isinstance(node.value, str) else node.value  # of a mapping pairs
    parts = [part for one in entries for part in (one if isinstance(one, tuple) else (one,))]
    size = 1 + sum(_require_tree(part, sizes) for part in parts)
    if size > MOST_NODES:
        raise Tangled(f"aliases make more than {MOST_NODES} values (line {node.start_mark.line + 1})")
    sizes[id(node)] = size
    return size


def _require_single_keys(keys: Iterable[tuple[Any, int]]) -> None:
    """Raises `Doubled`. `keys`: each with its line."""
    first: dict[str, int] = {}
    for key, line in keys:
        if repr(key) in first:
            lines = f"lines {first[repr(key)]} and {line}" if first[repr(key)] != line else f"line {line}"
            raise Doubled(f"the key {key!r} stands twice ({lines})")
        first[repr(key)] = line


def read_json(path: str | Path, flag: str, what: str = "JSON file") -> dict[str, Any]:
    """The object in the JSON file that `flag` names. Raises `ConfigError`."""
    text = read_text(path, flag, what)
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"got {flag} {path}, which is not JSON ({error}); correct it, or give another") from error
    if not isinstance(content, dict):
        raise ConfigError(f"got {flag} {path}, which does not hold a JSON object; give a {what}")
    return content


def parse_json(text: str) -> Any:
    """What JSON text says. Raises `ValueError`, its kind `Doubled` for a key that stands twice."""
    return json.loads(text, object_pairs_hook=_single)


def _single(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise Doubled(f"the key {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return out
