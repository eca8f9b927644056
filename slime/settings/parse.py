"""From a command line to `Args`: parse, read YAML, resolve; and how a program tells the user about mistakes.

Imports no torch, transformers, Ray or engine, so that a wrong flag is answered at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slime.core.errors import ConfigError, HookError, SlimeError, Terminated
from slime.core.text import visible
from slime.core.user_files import paths_in_words
from slime.settings.args import Args
from slime.settings.components import Components, entries_named_in, entries_named_on
from slime.settings.custom_yaml import config_on, merge_config
from slime.settings.foreign_names import FOREIGN_NAMES
from slime.settings.resolve import resolve
from slime.settings.roles import resolve_roles
from slime.settings.schema import owned_spellings
from slime.settings.table import components, flag_table


@paths_in_words()
def parse_args(argv: Sequence[str] | None = None, *, synchronous: bool = True) -> Args:
    """The resolved settings of a run.

    `argv`: words after the program's name (None: this process's). `synchronous`: the loop is train.py's, not
    train_async.py's.
    Answers --help [topic], --version and --explain on stdout and raises `SystemExit(0)`; raises `ConfigError` for
    everything that cannot work, all contradictions in one message.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    from slime.settings import answers

    text = answers.help_or_version(words)
    if text is not None:
        _answer(text)
    explain = "--explain" in words
    words = [w for w in words if w != "--explain"]
    config = config_on(words)
    known = _components_of(words, config)
    table = flag_table(known)
    given = table.parse(words, owned=owned_spellings(), elsewhere=FOREIGN_NAMES)
    origins = dict.fromkeys(given, "command line")
    custom: dict[str, Any] = {}
    if config is not None:
        given, custom = merge_config(given, origins, table, *config)
    args = resolve_roles(
        given,
        table=table,
        origins=origins,
        resolve=functools.partial(resolve, components=known, custom=custom, synchronous=synchronous),
    )
    args = args.replace(command=("slime", "train" if synchronous else "train-async", *words))
    if explain:
        _answer(answers.explain(args))
    return args


def _components_of(words: Sequence[str], config: tuple[str, dict[str, Any]] | None) -> Components:
    """Slime's settings with those of the user's entries, which bring flags of their own. Raises `ConfigError`."""
    named = entries_named_in(config[1], components()) if config is not None else {}
    named |= entries_named_on(words, components())
    return components(tuple((setting, path) for setting, paths in named.items() for path in paths))


def main_args(argv: Sequence[str] | None = None, *, synchronous: bool = True) -> Args:
    """`parse_args` for a script: a user's error is one message on stderr and exit code 2, without a traceback."""
    try:
        return parse_args(argv, synchronous=synchronous)
    except (ConfigError, HookError) as error:
        _stop(f"{type(error).__name__}: {error}", 2)


def run_or_exit(main: Callable[[Args], None], argv: Sequence[str] | None = None, *, synchronous: bool = True) -> None:
    """Parses the command line and runs `main(args)`; what ends either is reported in one message on stderr.

    Exit codes: 0 done, 1 the run failed (its traceback is in the driver's log), 2 the user's mistake (`ConfigError`,
    `HookError`), 130 Ctrl-C, 143 SIGTERM. An error that is none of ours keeps its traceback.
    """
    logs = None
    try:
        args = main_args(argv, synchronous=synchronous)
        logs = Path(args.run_dir).resolve() / "logs"
        main(args)
    except (KeyboardInterrupt, Terminated, SlimeError) as end:
        report_and_exit(end, logs)


def report_and_exit(end: BaseException, logs: Path | None) -> NoReturn:
    """Ends the process as `run_or_exit` says; what is none of ours is raised again. `logs`: folder of the run's logs.

    For the block that handles `end`.
    """
    if isinstance(end, KeyboardInterrupt | Terminated):
        said, code = ("ended by SIGTERM", 143) if isinstance(end, Terminated) else ("interrupted", 130)
        where = f"; what it recorded is in {logs.parent}" if logs is not None and logs.is_dir() else ""
        _stop(f"{said}; the run and all its processes are ended{where}{_notes(end)}", code)
    if isinstance(end, ConfigError | HookError):
        _stop(f"{type(end).__name__}: {end}{_notes(end)}", 2)
    if isinstance(end, SlimeError):
        _stop(f"{type(end).__name__}: {end}{_notes(end)}\nlogs of every process: {logs}", 1)
    raise end


def _notes(error: BaseException) -> str:
    """What was added to an error on its way up, a line each."""
    return "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))


def _stop(message: str, code: int) -> NoReturn:
    """Ends the process; the exception that is being handled has been reported, so it prints no traceback.

    It may quote what a model said, so a terminal obeys nothing in it.
    """
    sys.stderr.write(visible(message) + "\n")
    raise SystemExit(code) from None


def _answer(text: str) -> NoReturn:
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    raise SystemExit(0)
