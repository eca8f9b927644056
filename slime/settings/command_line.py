"""Parses command lines into `Args`, prints help texts, and reports a program's errors.

Does not import torch, transformers, Ray or an engine, so a wrong flag is reported immediately.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slime.core.errors import ConfigError, HookError, SlimeError, Terminated
from slime.core.text import HIDDEN, visible
from slime.core.user_files import paths_in_words
from slime.settings.all_flags import (
    Components,
    components,
    components_of,
    components_with,
    engine_flags,
    entries_named_in,
    entries_named_on,
    flag_table,
    own_flags,
    registered_names,
    secret_settings,
)
from slime.settings.args import MAPPINGS, NOT_A_SETTING, Args
from slime.settings.custom_yaml import Given, config_on, merge_config
from slime.settings.flags import Flag
from slime.settings.hook_contracts import CONTRACTS
from slime.settings.public_flags import FOREIGN_NAMES, tables
from slime.settings.resolve import resolve
from slime.settings.roles import resolve_roles
from slime.settings.schema import load, owned_spellings


@paths_in_words()
def parse_args(argv: Sequence[str] | None = None, *, synchronous: bool = True) -> Args:
    """Returns the resolved settings of a run.

    `argv` defaults to `sys.argv[1:]`. `synchronous` selects the loop of train.py instead of train_async.py. For --help
    [topic], --version and --explain, prints the text and raises `SystemExit(0)`. Raises one `ConfigError` that lists
    all problems.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    text = help_or_version(words)
    if text is not None:
        _answer(text)
    explain = EXPLAIN in words
    words = [w for w in words if w != EXPLAIN]
    found = parse_words(words)
    args = resolve_roles(
        found.given,
        table=flag_table(found.known),
        origins=found.origins,
        resolve=functools.partial(resolve, components=found.known, custom=found.custom, synchronous=synchronous),
    )
    args = args.replace(command=("slime", "train" if synchronous else "train-async", *words))
    if explain:
        _answer(explain_args(args))
    return args


@dataclasses.dataclass(frozen=True, slots=True)
class _Parsed:
    known: Components
    """slime's settings, including those of users' registry entries."""
    given: Given
    origins: dict[tuple[str, str], str]
    custom: dict[str, Any]


EXPLAIN = "--explain"
"""Prints the settings of a run instead of starting it."""


def parse_words(words: Sequence[str]) -> _Parsed:
    """Parses a command line and its --custom-config-path file. Checks each value, but no combinations of values.

    Raises one `ConfigError` that lists all problems.
    """
    config = config_on(words)
    named = entries_named_in(config[1], components()) if config is not None else {}
    known = components_with(named | entries_named_on(words, components()))
    table = flag_table(known)
    given = table.parse(words, owned=owned_spellings(), elsewhere=FOREIGN_NAMES)
    origins = dict.fromkeys(given, "command line")
    custom: dict[str, Any] = {}
    if config is not None:
        given, custom = merge_config(given, origins, table, *config)
    return _Parsed(known, given, origins, custom)


def main_args(argv: Sequence[str] | None = None, *, synchronous: bool = True) -> Args:
    """Calls `parse_args`. After a user error, prints one message to stderr and exits with code 2."""
    try:
        return parse_args(argv, synchronous=synchronous)
    except (ConfigError, HookError) as error:
        _stop(f"{type(error).__name__}: {error}", 2)


def run_or_exit(main: Callable[[Args], None], argv: Sequence[str] | None = None, *, synchronous: bool = True) -> None:
    """Parses the command line and runs `main(args)`. If either fails, prints one message to stderr.

    Exit codes: 0 success, 1 the run failed (its traceback is in the driver's log), 2 user error (`ConfigError`,
    `HookError`), 130 Ctrl-C, 143 SIGTERM. Any other exception propagates.
    """
    logs = None
    try:
        args = main_args(argv, synchronous=synchronous)
        logs = Path(args.run_dir).resolve() / "logs"
        main(args)
    except (KeyboardInterrupt, Terminated, SlimeError) as end:
        report_and_exit(end, logs)


def report_and_exit(end: BaseException, logs: Path | None) -> NoReturn:
    """Prints the message for `end` and exits with the code listed in `run_or_exit`, or re-raises `end`.

    Call it in the `except` block that handles `end`.
    """
    if isinstance(end, KeyboardInterrupt | Terminated):
        said, code = ("terminated by SIGTERM", 143) if isinstance(end, Terminated) else ("interrupted", 130)
        where = f"; its files are in {logs.parent}" if logs is not None and logs.is_dir() else ""
        _stop(f"{said}; the run and all its processes have stopped{where}{_notes(end)}", code)
    if isinstance(end, ConfigError | HookError):
        _stop(f"{type(end).__name__}: {end}{_notes(end)}", 2)
    if isinstance(end, SlimeError):
        _stop(f"{type(end).__name__}: {end}{_notes(end)}\nlogs of all processes: {logs}", 1)
    raise end


def _notes(error: BaseException) -> str:
    """Returns the notes of an exception (`add_note`), one per line."""
    return "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))


def _stop(message: str, code: int) -> NoReturn:
    """Exits without a traceback. The message may quote model output, so its control characters are escaped."""
    sys.stderr.write(visible(message) + "\n")
    raise SystemExit(code) from None


def _answer(text: str) -> NoReturn:
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    raise SystemExit(0)


# --- The output of --help, --version and --explain

TOPICS = ("slime", "megatron", "sglang", "router", "hooks", "public", "all")

_INTRO = """usage: python train.py --hf-checkpoint DIR --prompt-data FILE \\
           --rollout-batch-size N --num-rollout N [--flag value ...]

  --help [slime|megatron|sglang|router|hooks|all]   flags of slime (default) or an engine, the hooks, or all
  --help public                                     what differs from the public slime, flag by flag
  --explain                                         print every resolved value and where it came from, then exit
  --version                                         print versions, then exit
  --override                                        later flags override earlier ones; without it, two different
                                                    values for one flag are an error
"""
_AT_FILE = "Use @FILE to read the value from a file, because every user of the host can see command lines (ps)."


def help_or_version(words: Sequence[str]) -> str | None:
    """Returns the text for --help [topic] or --version; None if neither was given."""
    if "--version" in words:
        import slime

        packages = ", ".join(load(owner)["package"] for owner in ("megatron", "sglang", "router"))
        return f"slime {slime.__version__} (flags of {packages})"
    for word in ("--help", "-h"):
        if word in words:
            following = words[words.index(word) + 1 :]
            topic = following[0] if following and not following[0].startswith("-") else "slime"
            return help_text(topic)
    return None


def help_text(topic: str) -> str:
    """Returns the text of one help topic. Raises `ConfigError` for an unknown topic."""
    if topic not in TOPICS:
        raise ConfigError(f"--help has no topic {topic}; choose from {', '.join(TOPICS)}")
    if topic == "public":
        return tables()
    parts = [_INTRO]
    if topic in ("slime", "all"):
        headings = dict.fromkeys(f.group for f in own_flags(with_docs=True))
        parts += [_section(h, (f for f in own_flags(with_docs=True) if f.group == h)) for h in headings]
    for owner in ("megatron", "sglang", "router"):
        if topic in (owner, "all"):
            parts.append(_section(load(owner)["package"], engine_flags(owner)))
    if topic in ("hooks", "all"):
        parts.append(_hooks())
    return "\n".join(parts)


def _section(heading: str, flags: Iterable[Flag]) -> str:
    lines = [heading]
    for flag in flags:
        if flag.internal:
            continue
        lines.append(f"  {', '.join(flag.names)}{_value(flag)}{_off(flag)}")
        text = f"{flag.doc} {_AT_FILE}" if flag.secret else flag.doc
        text = text if flag.derived or flag.required else f"{text} [{_default(flag)}]"
        lines.append(textwrap.indent(textwrap.fill(text, 110, break_on_hyphens=False), "      "))
    return "\n".join(lines) + "\n"


def _hooks() -> str:
    lines = ["Hooks: how slime calls your code; arguments in [] are passed only if your function accepts them"]
    for kind, contract in CONTRACTS.items():
        lines += [f"  {kind}: --{contract.flag.replace('_', '-')}", f"      {contract.shape}"]
    return "\n".join(lines) + "\n"


def _value(flag: Flag) -> str:
    if flag.kind == "bool":
        return ""
    names = registered_names(flag)
    if names:
        return " {" + "|".join((*names, "import path")) + "}"
    if flag.choices and len(flag.choices) <= 8:
        return " {" + "|".join(map(str, flag.choices)) + "}"
    return f" {flag.kind.upper()}" + (" ..." if flag.is_list else "")


def _off(flag: Flag) -> str:
    shown = [n for n in flag.off_names if flag.default is True or n != f"--no-{flag.names[0][2:]}"]
    return f" | {', '.join(shown)}" if shown else ""


def _default(flag: Flag) -> str:
    if flag.kind == "bool":
        return "on" if flag.default else "off"
    return "none" if flag.default is None else f"default {json_line(flag.default)}"


def explain_args(args: Args) -> str:
    """Returns every resolved value with its origin, one per line, defaults last."""
    secrets = secret_settings(components_of(args))
    rows: list[tuple[str, tuple[str, str], Any]] = [
        (one.name, ("slime", one.name), getattr(args, one.name))
        for one in dataclasses.fields(args)
        if one.name not in (*MAPPINGS, *NOT_A_SETTING)
    ]
    rows += [(name, ("slime", name), value) for name, value in args.components.items()]
    for owner in ("megatron", "critic", "sglang", "router", "custom"):
        rows += [(f"{owner}.{name}", (owner, name), value) for name, value in getattr(args, owner).items()]
    lines: dict[bool, list[str]] = {True: [], False: []}
    for name, key, value in rows:
        origin = args.origins.get(name, "--custom-config-path" if name.startswith("custom.") else "command line")
        shown = HIDDEN if key in secrets and value is not None else json_line(value)
        lines[origin.startswith("default")].append(f"  {name} = {shown}    ({origin})")
    idle = [f"  {name} {text}" for name, text in args.idle.items()]
    told = ["Set, but without effect:", *idle, ""] if idle else []
    return "\n".join([*told, "Set, loaded and derived:", *lines[False], "", "Defaults:", *lines[True]])


def json_line(value: Any) -> str:
    return json.dumps(value, default=list) if isinstance(value, (dict, list, tuple)) else str(value)


# --- Editing of command lines: finds, removes and replaces flags


def groups(words: Sequence[str]) -> list[list[str]]:
    """Splits a command line into groups: each flag with its values."""
    out: list[list[str]] = []
    for word in words:
        if out and not (word.startswith("--") and len(word) > 2):
            out[-1].append(word)
        else:
            out.append([word])
    return out


def name_of(group: Sequence[str]) -> str:
    """Returns `ckpt_step` for `--ckpt-step 3`, `--ckpt_step 3` and `--ckpt-step=3`."""
    return group[0].partition("=")[0].lstrip("-").replace("-", "_")


def flag_value(words: Sequence[str], name: str) -> str | None:
    """Returns the first value of the last occurrence of a flag; None if there is no value."""
    found = None
    for group in groups(words):
        if name_of(group) == name:
            _, inline, value = group[0].partition("=")
            found = value if inline else next(iter(group[1:]), None)
    return found


def without(words: Sequence[str], *names: str) -> list[str]:
    """Returns the arguments without the named flags and their values."""
    return [word for group in groups(words) if name_of(group) not in names for word in group]


_LOOPS = {"train.py": "train", "train_async.py": "train-async"}


def execute_train(
    train_args: str,
    num_gpus_per_node: int | None = None,
    megatron_model_type: str | None = None,
    train_script: str = "train.py",
    extra_env_vars: Mapping[str, str] | None = None,
) -> None:
    """Runs `slime train` (or train-async) as a subprocess and waits until it exits.

    `num_gpus_per_node` and `megatron_model_type` are ignored: flags and the checkpoint already define both. Raises
    `ConfigError` for an unknown script and `subprocess.CalledProcessError` if the run fails.
    """
    if train_script not in _LOOPS:
        raise ConfigError(f"train_script is {train_script}, but must be one of {', '.join(_LOOPS)}")
    command = [sys.executable, "-m", "slime", _LOOPS[train_script], *shlex.split(train_args)]
    subprocess.run(command, check=True, env={**os.environ, **(extra_env_vars or {})})
