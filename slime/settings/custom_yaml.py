"""`--custom-config-path`: a YAML file of settings, checked like the command line, plus the user's own keys.

Keys are setting names: `rollout_batch_size`, Megatron's `lr`, `sglang_mem_fraction_static`, `router_policy`. Keys under
`custom` belong to the user. Any other unknown key is accepted only if the run has a user function that may read it
(`free_keys_have_a_reader`). Such a key may be a misspelling, so it is listed when the run starts
(`for_user_functions`), as is a setting of the file that only such a function can read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.text import HIDDEN
from slime.core.user_files import read_yaml
from slime.settings.flag_parser import OVERRIDE, FlagTable
from slime.settings.flags import coerce, refuse, shown
from slime.settings.hook_contracts import runs_user_code
from slime.settings.public_flags import FOREIGN_NAMES
from slime.settings.schema import owned_spellings

if TYPE_CHECKING:
    from slime.settings.args import Args

_FLAG = "--custom-config-path"

FREE = "custom."
"""Prefix that marks the user's own keys among the names of settings."""
NEAR = "; a similar setting is "
"""Message text before the name of a similar setting."""


def for_user_functions(
    args: Args, idle: Mapping[str, str], values: Mapping[str, Any], where: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the settings without effect that the run's user functions may read: name -> value.

    These are the settings of the file and, with `--custom-tis-function-path`, those of slime's importance weights.
    `idle`: setting -> value and reason. `values`: the user's values. `where`: setting -> where it was set.
    """
    found: dict[str, Any] = {}
    for name in idle if runs_user_code(args) else ():
        from_file = args.custom_config_path is not None and where.get(name) == args.custom_config_path
        of_weights = name in _OF_WEIGHTS and args.custom_tis_function_path is not None
        if name.startswith(FREE):
            found[name] = args.custom[name.removeprefix(FREE)]
        elif name in values and (from_file or of_weights) and HIDDEN not in idle[name]:
            found[name] = values[name]
    return found


def for_functions_listed(args: Args) -> list[str]:
    """Returns a line for each setting that only user functions may read, with a similar setting if there is one."""
    lines = []
    for name, value in args.for_functions.items():
        _, near, similar = args.origins.get(name, "").partition(NEAR)
        lines.append(f"{name} {value}{near}{similar}")
    return lines


_OF_WEIGHTS = frozenset(("get_mismatch_metrics", "tis_level", "tis_mode", "tis_clip", "tis_clip_low"))

Given = dict[tuple[str, str], Any]
"""(owner, dest) -> value, as the user set it."""


def config_on(words: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
    """Returns the path and content of the file named on a command line, or None. Raises `ConfigError`."""
    path = None
    for position, word in enumerate(words):
        flag, inline, value = word.partition("=")
        if flag.replace("_", "-") == _FLAG:
            following = words[position + 1] if position + 1 < len(words) else None
            path = value if inline else following
    return None if path is None or path.startswith("--") or path.lower() == "none" else (path, read_yaml(path, _FLAG))


def words_behind(words: Sequence[str]) -> Sequence[str]:
    """Returns the arguments after the first `--override` that follows the file on a command line."""
    at = max(n for n, word in enumerate(words) if word.partition("=")[0].replace("_", "-") == _FLAG)
    return words[words.index(OVERRIDE, at) + 1 :] if OVERRIDE in words[at:] else ()


def merge_config(
    given: Given,
    origins: dict[tuple[str, str], str],
    table: FlagTable,
    path: str,
    content: Mapping[str, Any],
    *,
    replaced: Collection[tuple[str, str]] = (),
) -> tuple[Given, dict[str, Any]]:
    """Returns `given` merged with the file's settings, and the user's own keys. Adds to `origins`.

    `replaced`: settings that the command line replaces (`--override`), whatever the file says. Raises `ConfigError` for
    invalid settings, and for other settings with a different value on the command line.
    """
    custom = content.get("custom", {})
    if not isinstance(custom, dict):
        raise ConfigError(f"{path}: custom is {custom!r}, but must be a mapping from names to values")
    merged, own, problems = dict(given), dict(custom), []
    compared = {setting: value for setting, value in given.items() if setting not in replaced}
    seen: dict[tuple[str, str], str] = {}
    for key, value in content.items():
        if key == "custom":
            continue
        if is_free(table, str(key)):
            own[str(key)] = value
            origins["custom", str(key)] = f"{value}, which needs a user function that reads it{_near(table, str(key))}"
            continue
        try:
            (owner, dest), typed = setting_of(
                table,
                str(key),
                value,
                compared,
                where=f"{path}: {key}",
                otherwise=f", or write {OVERRIDE} before the flag",
            )
        except ConfigError as error:
            problems.append(str(error))
            continue
        if (other := seen.setdefault((owner, dest), str(key))) != str(key):
            problems.append(f"{path}: {other} and {key} are the same setting; keep one")
        if (owner, dest) in replaced:
            continue
        merged[owner, dest] = typed
        origins[owner, dest] = f"{path}"
    refuse(problems)
    return merged, own


def is_free(table: FlagTable, key: str) -> bool:
    """Returns whether a key is neither a setting nor a setting's name in another program."""
    name = "--" + key.replace("_", "-")
    return name not in table.by_name and name not in owned_spellings() and name[2:] not in FOREIGN_NAMES


def _near(table: FlagTable, key: str) -> str:
    near = table.nearest("--" + key.replace("_", "-"))
    return f"{NEAR}{near[2:].replace('-', '_')}" if near else ""


def setting_of(
    table: FlagTable, key: str, value: Any, given: Given, *, where: str, otherwise: str = ""
) -> tuple[tuple[str, str], Any]:
    """Returns ((owner, dest), value) for one key of a file.

    `otherwise`: what else the user can do if a setting has two values.

    Raises `ConfigError` for an invalid setting, or if `given` has a different value for the setting.
    """
    name, owned = "--" + key.replace("_", "-"), owned_spellings()
    if name in owned:
        raise ConfigError(f"{where}: slime sets this itself; {owned[name]}")
    if name not in table.by_name:
        raise ConfigError(f"{where} is not a setting of slime; {FOREIGN_NAMES[name[2:]]}")
    flag, on = table.by_name[name]
    if not on and isinstance(value, bool):
        value = not value
    typed = coerce(flag, value, where=where)
    where_given = (flag.owner, flag.dest)
    if given.get(where_given, typed) != typed:
        raise ConfigError(
            f"{where} is {shown(flag, typed)} here and {shown(flag, given[where_given])} on the command line; set it "
            f"in only one place{otherwise}"
        )
    return where_given, typed
