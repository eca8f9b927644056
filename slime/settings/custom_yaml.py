"""`--custom-config-path`: settings from YAML, as strict as the command line, and the user's own under `custom`.

Keys are setting names: `rollout_batch_size`, Megatron's `lr`, `sglang_mem_fraction_static`, `router_policy`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError
from slime.settings.flags import coerce
from slime.settings.schema import owned_spellings
from slime.settings.table import flag_table

_KEY = ("slime", "custom_config_path")


def merge_custom_config(
    given: dict[tuple[str, str], Any], origins: dict[tuple[str, str], str]
) -> tuple[dict[tuple[str, str], Any], dict[str, Any]]:
    """(`given` with the file's settings, the file's `custom` mapping). Notes origins. Raises `ConfigError`.

    A setting that is on the command line too must have the same value there: one of the two would be ignored silently.
    """
    path = given.get(_KEY)
    if path is None:
        return given, {}
    content = _read(path)
    custom = content.pop("custom", {})
    if not isinstance(custom, dict):
        raise ConfigError(f"{path}: got custom: {custom!r}, which is no mapping; write names and values below it")
    merged, table, owned = dict(given), flag_table(), owned_spellings()
    for key, value in content.items():
        where = f"{path}: {key}"
        name = "--" + str(key).replace("_", "-")
        if name in owned:
            raise ConfigError(f"{where}: slime sets this itself; {owned[name]}")
        if name not in table.by_name:
            near = table.nearest(name)
            hint = f"did you mean {near[2:].replace('-', '_')}?" if near else "your own settings go below `custom`."
            raise ConfigError(f"{where}: got an unknown setting; {hint}")
        flag, on = table.by_name[name]
        if not on and isinstance(value, bool):
            value = not value
        typed = coerce(flag, value, where=where)
        where_given = (flag.owner, flag.dest)
        if given.get(where_given, typed) != typed:
            raise ConfigError(
                f"{where}: got {typed!r} here and {given[where_given]!r} on the command line; give it in one place"
            )
        merged[where_given] = typed
        origins[where_given] = f"{path}"
    return merged, custom


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
        raise ConfigError(f"got {path}, which holds no mapping; write `name: value` lines")
    return content
