"""What is another one than when a run was started: settings, code, files, versions, environment, host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.cli.rerun import moved_path
from slime.observability.run_folder import host_facts, plain, versions
from slime.observability.start_record import NOT_READ, OUTPUTS, SLIME, checkouts, environment, input_files

OF_THE_START = OUTPUTS | {"run_id", "origins", "idle", "load"}
"""Settings that are another one in every start, or follow the run's folder."""


def differences(
    start: Mapping[str, Any], settings: Mapping[str, Any], words: Sequence[str], *, synchronous: bool
) -> list[str]:
    """One line for each, in the order in which they matter.

    `start`: a record of `run.json`; `settings`: its `args.json`; `words`: the flags now, parsed as the loop does.
    Raises `ConfigError` for flags that cannot work.
    """
    from slime.settings import check_hooks, parse_args

    args = parse_args(
        [w for w in words if w not in ("--explain", "--help", "-h", "--version")], synchronous=synchronous
    )
    check_hooks(args)  # so that the files of modules are known
    now = plain(args.to_json_dict())
    return [
        *_settings(_in_place_of(settings, Path(settings["run_dir"]).absolute(), Path(args.run_dir)), now),
        *_code(start),
        *_files(start["files"], input_files(now)),
        *_named("version of", start["versions"], versions()),
        *_named("environment", _variables(start["environment"], start), _variables(environment(), start)),
        *_named("host", start["host"], host_facts()),
    ]


def _in_place_of(value: Any, old: Path, new: Path) -> Any:
    """Settings as they would be in the new run folder; a value without a slash is not a path."""
    if isinstance(value, Mapping):
        return {key: _in_place_of(inner, old, new) for key, inner in value.items()}
    return moved_path(value, old, new) if isinstance(value, str) and "/" in value else value


def _settings(then: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in dict.fromkeys((*then, *now)):
        if name in OF_THE_START and not prefix:
            continue
        one, two = then.get(name), now.get(name)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            yield from _settings(one, two, f"{prefix}{name}.")
        elif str(one) != str(two):
            yield f"setting {prefix}{name}: {_short(one)} then, {_short(two)} now"


def _code(start: Mapping[str, Any]) -> Iterator[str]:
    now = {one.root: one for one in checkouts(SLIME, Path(start["cwd"]))}
    for then in start["code"]:
        root = then["root"]
        one = now.pop(root, None)
        if one is None:
            yield f"code {root}: commit {then['commit'][:12]} then, not used now"
        elif one.commit != then["commit"]:
            yield f"code {root}: commit {then['commit'][:12]} then, {one.commit[:12]} now"
        if one is not None and NOT_READ in (one.diff_sha256, then["diff_sha256"]):
            when = "then" if then["diff_sha256"] == NOT_READ else "now"
            yield f"code {root}: uncommitted changes could not be read {when}, so they are not compared"
        elif one is not None and one.diff_sha256 != then["diff_sha256"]:
            yield f"code {root}: uncommitted changes are others than then (starts/*/{Path(root).name}.diff)"
    for one in now.values():
        yield f"code {one.root}: not used then, commit {one.commit[:12]} now"


def _files(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    before, after = ({one["path"]: one for one in files} for files in (then, now))
    for path, one in before.items():
        two = after.get(path)
        if two is None:
            yield f"file {path} ({one['setting']}): {'not read now' if os.path.exists(path) else 'is gone'}"
        elif one["bytes"] == two["bytes"] and {one["hashed"], two["hashed"]} == {"all", "ends"}:
            yield f"file {path} ({one['setting']}): not compared; {one['hashed']} hashed then, {two['hashed']} now"
        elif (one["bytes"], one["sha256"]) != (two["bytes"], two["sha256"]):
            yield f"file {path} ({one['setting']}): changed, {one['bytes']} bytes then, {two['bytes']} now"
    for path in after.keys() - before.keys():
        yield f"file {path} ({after[path]['setting']}): not read then"


def _variables(found: Mapping[str, str], start: Mapping[str, Any]) -> dict[str, str]:
    """Without what the commands themselves put into PYTHONPATH."""
    own = {start["cwd"], str(Path(__file__).parents[2])}
    path = [part for part in found.get("PYTHONPATH", "").split(os.pathsep) if part and part not in own]
    return {**found, "PYTHONPATH": os.pathsep.join(path)}


def _named(what: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*then, *now)):
        if then.get(name) != now.get(name):
            yield f"{what} {name}: {_short(then.get(name))} then, {_short(now.get(name))} now"


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
