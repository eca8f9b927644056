"""`--custom-config-path`: settings from YAML, as strict as the command line, and the user's own under `custom`.

Keys are setting names: `rollout_batch_size`, Megatron's `lr`, `sglang_mem_fraction_static`, `router_policy`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError
from slime.settings.flags import FlagTable, coerce, shown
from slime.settings.foreign_names import FOREIGN_NAMES
from slime.settings.problems import refuse
from slime.settings.schema import owned_spellings

_FLAG = "--custom-config-path"

Given = dict[tuple[str, str], Any]
"""(owner, dest) -> value, as the user gave it."""


def config_on(words: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
    """(path, content) of the file that a command line names; None without one. Raises `ConfigError`."""
    path = None
    for position, word in enumerate(words):
        flag, inline, value = word.partition("=")
        if flag.replace("_", "-") == _FLAG:
            following = words[position + 1] if position + 1 < len(words) else None
            path = value if inline else following
    return None if path is None or path.startswith("--") or path.lower() == "none" else (path, _read(path))


def merge_config(
    given: Given, origins: dict[tuple[str, str], str], table: FlagTable, path: str, content: Mapping[str, Any]
) -> tuple[Given, dict[str, Any]]:
    """(`given` with the file's settings, the file's `custom` mapping). Notes origins. Raises `ConfigError`.

    A setting that is on the command line too must have the same value there: one of the two would be ignored silently.
    """
    custom = content.get("custom", {})
    if not isinstance(custom, dict):
        raise ConfigError(f"{path}: got custom: {custom!r}, which is not a mapping; write names and values below it")
    merged, problems = dict(given), []
    for key, value in content.items():
        if key == "custom":
            continue
        try:
            (owner, dest), typed = _setting(table, str(key), value, given, where=f"{path}: {key}")
        except ConfigError as error:
            problems.append(str(error))
            continue
        merged[owner, dest] = typed
        origins[owner, dest] = f"{path}"
    refuse(problems)
    return merged, custom


def _setting(table: FlagTable, key: str, value: Any, given: Given, *, where: str) -> tuple[tuple[str, str], Any]:
    """((owner, dest), value) of one line of the file. Raises `ConfigError`."""
    name, owned = "--" + key.replace("_", "-"), owned_spellings()
    if name in owned:
        raise ConfigError(f"{where}: slime sets this itself; {owned[name]}")
    if name not in table.by_name:
        near = table.nearest(name)
        hint = f"did you mean {near[2:].replace('-', '_')}?" if near else "your own settings go below `custom`."
        raise ConfigError(f"{where}: got an unknown setting; {FOREIGN_NAMES.get(name[2:], hint)}")
    flag, on = table.by_name[name]
    if not on and isinstance(value, bool):
        value = not value
    typed = coerce(flag, value, where=where)
    where_given = (flag.owner, flag.dest)
    if given.get(where_given, typed) != typed:
        raise ConfigError(
            f"{where}: got {shown(flag, typed)} here and {shown(flag, given[where_given])} on the command line; "
            "give it in one place"
        )
    return where_given, typed


def _read(path: str) -> dict[str, Any]:
    """The file's mapping. Raises `ConfigError`."""
    import yaml

    if not Path(path).is_file():
        raise ConfigError(f"got --custom-config-path {path}, which does not exist; give a YAML file")
    try:
        content = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"got {path}, which is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"got {path}, which is not a mapping; write `name: value` lines")
    return content
