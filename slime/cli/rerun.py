"""`slime rerun RUN [flags]`: repeats a run in a new folder, with the settings recorded in the run's folder.

The recorded command line is parsed in its original working folder; additional flags override it. Outputs inside the run
folder, whether set by a flag or in a YAML file, are redirected to the new folder by flags after `--override`. All
differences from the recorded launch are listed before anything starts.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError, DataError
from slime.core.text import HIDDEN, slime_command
from slime.core.user_files import paths_in_words
from slime.observability.run_folder import host_facts, plain, versions
from slime.observability.start_record import (
    NOT_READ,
    OUTPUTS,
    SHARED_OUTPUTS,
    SLIME,
    checkouts,
    environment,
    input_files,
)
from slime.settings.command_line import EXPLAIN, flag_value, groups, name_of, parse_words, without
from slime.settings.custom_yaml import config_on
from slime.settings.flag_parser import OVERRIDE

if TYPE_CHECKING:
    from slime.settings import Args

_RECORDED = {
    **{"command": list, "cwd": str, "time": str, "code": list, "files": list},
    **{"environment": dict, "versions": dict, "host": dict},
}
"""Key in the record of a launch -> type of its value."""
LOOPS = {"train": True, "train-async": False}
"""Command -> whether its loop is synchronous."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="folder of the run; flags after it override the recorded ones",
    )
    parser.add_argument("--start", type=int, default=0, help="number of the launch, for a resumed run (default 0)")


def run(options: argparse.Namespace) -> int:
    """Prints the differences and starts the run. Raises `DataError` for a missing run, and the loop's `ConfigError`."""
    again = prepare(options.run.resolve(), options.start, list(options.words))
    print(again.heading)
    print("\n".join(f"  {line}" for line in again.told or ("nothing recorded has changed",)))
    print(f"in {Path.cwd()}: {slime_command(again.loop)} {shlex.join(again.words)}", flush=True)
    _become(again)
    return 0


@dataclass(frozen=True, slots=True)
class Again:
    """A run to repeat in the current working folder and environment."""

    heading: str
    loop: str
    """A key of `LOOPS`."""
    words: tuple[str, ...]
    told: tuple[str, ...]
    """The differences from the recorded launch."""


def prepare(folder: Path, number: int, given: list[str]) -> Again:
    """Prepares the rerun. Changes to the recorded working folder, and sets recorded variables that are unset."""
    start = recorded_start(folder, number)
    _, loop, *recorded = start["command"]
    if not Path(start["cwd"]).is_dir():
        raise DataError(f"{folder} was started in {start['cwd']}, but that folder no longer exists; create it")
    run_dir = flag_value(given, "run_dir")
    target = new_folder(folder) if run_dir is None else Path(run_dir).absolute()  # relative to the current folder
    os.chdir(start["cwd"])
    for name, value in start["environment"].items():
        os.environ.setdefault(name, value)
    _require_free("run_dir", target)
    kept, dropped = without_hidden(recorded)
    more = without(given, "run_dir")
    then, chosen = set_by(kept), named_in(more)
    goes_on = number > 0 and resumes_itself(then) and "load" not in chosen
    place = resumed_from(folder, number, then, chosen) if goes_on else {}
    new = {**moved(then, chosen, folder, target), **place, "run_dir": str(target)}
    outputs = [word for name, value in new.items() for word in (_flag(name), value)]
    words = [*without(kept, *new), OVERRIDE, *outputs, *more]
    settings = _json_object(folder / "starts" / str(number) / "args.json")
    if not isinstance(settings.get("run_dir"), str):
        raise DataError(f"args.json of start {number} of {folder} has no run_dir; restore the file from a backup")
    told = differences(start, settings, words, synchronous=LOOPS[loop], free=then.keys() - chosen)
    told += [f"{flag} was a secret and is not recorded; set it again if needed" for flag in dropped]
    heading = f"{folder}, start {number} of {num_starts(folder)}, {start['time']}"
    return Again(heading, loop, tuple(words), tuple(told))


def _become(again: Again) -> None:
    """Replaces this process with a new interpreter, so that paths and threads follow the recorded environment."""
    root = str(Path(__file__).parents[2])
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path if root in path else [*path, root])}
    os.execvpe(sys.executable, [sys.executable, "-m", "slime", again.loop, *again.words], environment)


def num_starts(folder: Path) -> int:
    """Returns the number of launches of a run. Raises `DataError` if the folder is not a run folder."""
    return len(_starts(folder))


def recorded_start(folder: Path, number: int) -> dict[str, Any]:
    """Returns the record of a launch. Raises `DataError` if there is none or it is incomplete."""
    starts = _starts(folder)
    if not 0 <= number < len(starts):
        raise DataError(
            f"--start is {number}, but the launches in {folder} are 0 to {len(starts) - 1}; choose one of them"
        )
    start = starts[number]
    if missing := [name for name, kind in _RECORDED.items() if not isinstance(start.get(name), kind)]:
        raise DataError(
            f"run.json of {folder} has no {missing[0]} of launch {number}: the file is damaged, or an earlier release "
            "wrote it; start the run from its command line"
        )
    words = [str(word) for word in start["command"]]
    if words[:1] != ["slime"] or not LOOPS.keys() & {*words[1:2]}:
        raise DataError(f"run.json of {folder} does not contain a slime command; start the run from its command line")
    return start


@paths_in_words()
def _starts(folder: Path) -> list[dict[str, Any]]:
    record = folder / "run.json"
    if not record.is_file():
        raise DataError(f"{folder} has no run.json; pass the folder of a run")
    found = _json_object(record).get("starts")
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise DataError(f"{record} has no list of starts; restore the file, or start the run from its command line")
    return found


def _json_object(path: Path) -> dict[str, Any]:
    """Raises `DataError` unless the file is a JSON object."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON ({error}); restore it from a backup") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is not a JSON object; restore the file from a backup")
    return found


def new_folder(folder: Path) -> Path:
    """Returns an unused folder name next to the run: RUN-rerun, RUN-rerun-2, ..."""
    numbers = iter(range(2, 1 << 20))
    target = folder.with_name(f"{folder.name}-rerun")
    while target.exists():
        target = folder.with_name(f"{folder.name}-rerun-{next(numbers)}")
    return target


def without_hidden(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns (arguments without the flags whose values were secrets, names of the removed flags)."""
    hidden = [group for group in groups(words) if any(HIDDEN in word for word in group)]
    kept = [word for group in groups(words) if group not in hidden for word in group]
    return kept, [group[0].partition("=")[0] for group in hidden]


def set_by(words: Sequence[str]) -> dict[str, Any]:
    """Returns the settings of slime and Megatron on a command line and in its `--custom-config-path` file.

    Raises `ConfigError` for an invalid setting.
    """
    given = parse_words(_started(words)).given
    return {name: value for (owner, name), value in given.items() if owner in ("slime", "megatron")}


def named_in(words: Sequence[str]) -> set[str]:
    """Returns the names of the settings on a command line and in its `--custom-config-path` file."""
    config = config_on(words)
    in_file = () if config is None else config[1]
    return {name_of(group) for group in groups(words)} | {str(name).replace("-", "_") for name in in_file}


def resumes_itself(then: Mapping[str, Any]) -> bool:
    """Returns whether `load` is the run's own `save`."""
    save, load = then.get("save"), then.get("load")
    return save is not None and load is not None and Path(save).absolute() == Path(load).absolute()


def resumed_from(folder: Path, number: int, then: Mapping[str, Any], chosen: set[str]) -> dict[str, str]:
    """Returns the settings that load the checkpoint that the recorded launch loaded; empty if it began at step 0.

    Raises `DataError` if neither the record nor the settings name the checkpoint.
    """
    load = {"load": str(Path(then["load"]).absolute())}
    if then.get("ckpt_step") is not None or "ckpt_step" in chosen:
        return load
    step = _first_step(folder, number)
    if step is None or then.get("finetune"):
        raise DataError(
            f"{folder} does not record the checkpoint that --start {number} loaded; add --load "
            f"{shlex.quote(load['load'])} --ckpt-step N"
        )
    return {**load, "ckpt_step": str(step - 1)} if step > 0 else {}


def _first_step(folder: Path, number: int) -> int | None:
    """Returns the first step that a launch logged, or None."""
    from slime.observability.report.record import read_run

    try:
        return read_run(folder).starts[number].step
    except DataError:
        return None


def moved(then: Mapping[str, Any], chosen: set[str], old: Path, new: Path) -> dict[str, str]:
    """Returns the recorded outputs in the run folder, moved to the new folder, without those in `chosen`.

    A `load` of the run's own `save` moves with it, and is dropped if the user chose a different `save`.
    """
    out = {}
    for name in sorted(OUTPUTS - {"run_dir"} - chosen):
        if then.get(name) is not None and (place := moved_path(then[name], old, new)) != then[name]:
            out[name] = place
    if resumes_itself(then) and "load" not in chosen:
        load = "none" if "save" in chosen else out.get("save")
        out |= {} if load is None else {"load": load}
    return out


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def moved_path(value: str, old: Path, new: Path) -> str:
    """Returns the path, moved from the old folder to the new one if it is inside the old folder."""
    path = Path(value).absolute()
    return str(new / path.relative_to(old)) if path.is_relative_to(old) else value


def require_free(args: Args, names: Collection[str]) -> None:
    """Raises `ConfigError` if one of the outputs in `names` exists. In a shared folder, only the run's part counts."""
    for name in sorted(OUTPUTS & set(names)):
        place = getattr(args, name, None)  # None if it belongs to an entry that the run does not use
        if name in SHARED_OUTPUTS:
            experiment = args.tb_experiment_name if name == "tensorboard_dir" else None
            place = experiment and place and Path(place) / (args.tb_project_name or "slime") / experiment
        if place is not None:
            _require_free(name, Path(place).absolute())


def _require_free(name: str, path: Path) -> None:
    """Raises `ConfigError` for a path that is not empty."""
    found = glob.glob(re.sub(r"\{[^{}]*\}", "*", glob.escape(str(path))))
    if any(not Path(one).is_dir() or any(Path(one).iterdir()) for one in found):
        flag = _flag(name)
        raise ConfigError(
            f"{flag} {path} is not empty: the rerun would overwrite or mix its content; set a different {flag}"
        )


# --- differences from the recorded launch

OF_THE_START = OUTPUTS | {"run_id", "origins", "idle", "load"}
"""Settings that differ in every launch, or depend on the run folder."""


def differences(
    start: Mapping[str, Any],
    settings: Mapping[str, Any],
    words: Sequence[str],
    *,
    synchronous: bool,
    free: Collection[str],
) -> list[str]:
    """Returns one line per difference, most important first.

    `start`: the record in `run.json`; `settings`: `args.json` of that launch; `words`: the current flags; `free`:
    outputs that must not exist. Raises the loop's `ConfigError`.
    """
    from slime.settings import check_hooks, parse_args

    args = parse_args(_started(words), synchronous=synchronous)
    require_free(args, free)
    check_hooks(args)  # imports the users' modules, so that their files are compared
    now = plain(args.to_json_dict())
    return [
        *_settings(_in_place_of(settings, Path(settings["run_dir"]).absolute(), Path(args.run_dir)), now),
        *_code(start),
        *_files(start["files"], input_files(now)),
        *_named("version of", start["versions"], versions()),
        *_named("environment", _variables(start["environment"], start), _variables(environment(), start)),
        *_named("host", start["host"], host_facts()),
    ]


def _started(words: Sequence[str]) -> list[str]:
    """Returns the arguments without the flags that only print information."""
    return [word for word in words if word not in (EXPLAIN, "--help", "-h", "--version")]


def _in_place_of(value: Any, old: Path, new: Path) -> Any:
    """Returns the settings with paths moved to the new run folder. A value without a slash is not a path."""
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
            yield f"code {root}: uncommitted changes differ (starts/*/{Path(root).name}.diff)"
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
    """Returns the variables, without the PYTHONPATH entries that the commands add."""
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
