"""`slime <command>`: the entry point.

A command is a row of `COMMANDS` with `add_flags(parser)` and `run(options) -> int` from a file in this folder. `run`
checks its arguments before heavy imports, so help and errors appear immediately.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from slime.cli import (
    certify,
    convert,
    doctor,
    environments,
    inspect_run,
    loops,
    plan,
    rerun,
    schemas,
    serve,
    upgrade_check,
)
from slime.core.errors import ConfigError, SlimeError, Terminated
from slime.core.text import nearest, program, slime_command, visible
from slime.core.user_files import path_in_words
from slime.settings.command_line import help_or_version


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    help: str
    """One line for `slime --help`."""
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit code (0 success, 1 failure, 2 usage error)."""
    words: Literal["own", "more", "all"] = "own"
    """The accepted arguments. own: the flags declared by `add_flags`. more: also other arguments, which are stored in
    `options.words`. all: every argument after the name is stored in `options.words`, including `--help`."""


COMMANDS = (
    Command(
        "train",
        "train: alternate generation and training (train.py)",
        loops.add_flags,
        loops.run_sync,
        words="all",
    ),
    Command(
        "train-async",
        "train while generating (train_async.py)",
        loops.add_flags,
        loops.run_async,
        words="all",
    ),
    Command(
        "serve", "serve engines and router without training, until Ctrl-C", serve.add_flags, serve.run, words="more"
    ),
    Command(
        "certify",
        "measure whether trainer and engines agree bit for bit, whether a run repeats, and what this costs",
        certify.add_flags,
        certify.run,
        words="more",
    ),
    Command(
        "plan",
        "predict the memory and the seconds of a run, and propose layouts that fit",
        plan.add_flags,
        plan.run,
        words="more",
    ),
    Command(
        "env",
        "list RL environments of other projects, write their tasks, or try one episode",
        environments.add_flags,
        environments.run,
        words="more",
    ),
    Command("rerun", "repeat a run with the settings recorded in its folder", rerun.add_flags, rerun.run, words="more"),
    Command(
        "recipe",
        "run a recipe that comes with slime",
        loops.add_recipe_flags,
        loops.run_recipe,
        words="more",
    ),
    Command(
        "cluster",
        "write the files that start a run under Slurm, on Kubernetes or as a job of Ray",
        loops.add_cluster_flags,
        loops.run_cluster,
        words="more",
    ),
    Command(
        "report",
        "write report.html, report.png and report.md for a run folder",
        inspect_run.add_report_flags,
        inspect_run.run_report,
    ),
    Command("samples", "print a run's best and worst samples", inspect_run.add_samples_flags, inspect_run.run_samples),
    Command(
        "trace",
        "merge the traces of all launches of a run, for ui.perfetto.dev",
        inspect_run.add_trace_flags,
        inspect_run.run_trace,
    ),
    Command(
        "fleet",
        "list the engines of a run, drain some for maintenance, or take them back",
        inspect_run.add_fleet_flags,
        inspect_run.run_fleet,
    ),
    Command(
        "convert",
        "convert a Hugging Face folder, a checkpoint or a torch_dist folder to a Hugging Face or torch_dist folder; "
        "or a rollout X.pt to X.jsonl.zst",
        convert.add_flags,
        convert.run,
    ),
    Command(
        "tokenizer",
        "write a tokenizer.json for a folder whose tokenizer is code",
        convert.add_tokenizer_flags,
        convert.run_tokenizer,
    ),
    Command(
        "weights-agent",
        "load the weights that a trainer writes to a folder into an engine",
        serve.add_agent_flags,
        serve.run_agent,
    ),
    Command("doctor", "check this machine: versions, device, memory, ports, engines", doctor.add_flags, doctor.run),
    Command("schemas", "compare the flag schemas with the installed engines", schemas.add_flags, schemas.run),
    Command("upgrade-check", "try newer versions of the engines", upgrade_check.add_flags, upgrade_check.run),
)
"""Every command, in the order of `slime --help`."""


class _Once(argparse._StoreAction):
    """Refuses a second value for a flag, because argparse would silently drop the first one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given: dict[str, Any] = namespace.__dict__.setdefault("given", {})
        if self.dest in given and given[self.dest] != values:
            raise argparse.ArgumentError(self, f"it has two values, {given[self.dest]} and {values}; keep one")
        given[self.dest] = values
        super().__call__(parser, namespace, values, option)


class _Parser(argparse.ArgumentParser):
    """Raises a one-sentence `ConfigError` instead of printing the usage and argparse's message."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self._in_words(message)}; {self.prog} --help shows all arguments")

    def _in_words(self, message: str) -> str:
        required = "the following arguments are required: "
        if message.startswith(required):
            missing = message.removeprefix(required)
            every = [a for a in self._actions if a.required]
            given = " ".join(
                str(a.metavar) if not a.option_strings else f"{a.option_strings[0]} {a.metavar}" for a in every
            )
            return f"{missing} {'are' if ',' in missing else 'is'} missing; write {self.prog} {given}"
        name, _, problem = message.removeprefix("argument ").partition(": ")
        if found := re.fullmatch(r"invalid (?:int|float|_port) value: (.*)", problem):
            return f"{name} is {found[1]}, but must be a number"
        if found := re.fullmatch(r"invalid choice: '(.*)' \(choose from (.*)\)", problem):
            known = found[2].replace("'", "")
            near = nearest(found[1], known.split(", "))
            meant = f"; did you mean {near}? It" if near else ", but"
            return f"{name} is {found[1]!r}{meant} must be one of {known}"
        if problem == "expected one argument":
            return f"{name} has no value; write {name} VALUE"
        return f"{name}: {problem}" if problem else message

    def unexpected(self, words: Sequence[str]) -> NoReturn:
        """Raises `ConfigError` about the first argument that the command does not have."""
        flag = next((word.partition("=")[0] for word in words if word.startswith("-") and len(word) > 1), None)
        if flag is None:
            raise ConfigError(f"{words[0]!r} is one argument too many; {self.prog} --help shows all arguments")
        do = f"{self.prog} --help shows all arguments"
        if near := nearest(flag, self._option_string_actions):
            do = f"did you mean {near}?"
        elif owner := command_with(flag):
            do = f"it is a flag of {slime_command(owner)}; {do}"
        raise ConfigError(f"unknown flag {flag}; {do}")


def command_with(flag: str) -> str | None:
    """Returns the name of the first command with a flag; the flags of a run belong to `train`."""
    from slime.settings.all_flags import flag_table

    return _with_own(flag) or ("train" if flag.replace("_", "-") in flag_table().by_name else None)


def _with_own(flag: str) -> str | None:
    return next((c.name for c in COMMANDS if flag in parser_of(c)._option_string_actions), None)


@functools.cache
def parser_of(command: Command) -> _Parser:
    """Returns the parser of a command's own arguments."""
    own = build_parser()._subparsers
    assert own is not None, "the parser has commands"
    (action,) = own._group_actions
    assert isinstance(action, argparse._SubParsersAction), "the commands are the only group"
    found: _Parser = action.choices[command.name]
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=program(), description="LLM post-training for RL scaling.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.help, description=command.help, allow_abbrev=False)
        for action in ("store", None):
            own.register("action", action, _Once)
        command.add_flags(own)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((c for c in COMMANDS if words[:1] == [c.name]), None)
    if command is None:
        return _without_command(words)
    try:
        with _terminated() if command.words == "own" else contextlib.nullcontext():  # the loops have their own handler
            return command.run(_options(command, words))
    except (KeyboardInterrupt, Terminated) as end:
        said, code = ("terminated by SIGTERM", 143) if isinstance(end, Terminated) else ("interrupted", 130)
        print(f"{program(command.name)}: {said}", file=sys.stderr)
        return code
    except SlimeError as error:
        print(f"{program(command.name)}: {visible(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:
        if command.words != "own":  # a loop's error may concern a file that the user did not name
            raise
        told = path_in_words(error) if error.filename else error.strerror or str(error)
        print(f"{program(command.name)}: {visible(told)}", file=sys.stderr)
        return 1


def _without_command(words: Sequence[str]) -> int:
    """Answers `slime --help`, `slime --version`, and words that do not start with a command."""
    first = words[0] if words else ""
    if first in ("-h", "--help", "help") and not (first == "help" and words[1:]):
        build_parser().print_help()
        return 0
    if first == "--version":
        print(help_or_version(words))
        return 0
    names = [command.name for command in COMMANDS]
    do = f"{slime_command('--help')} lists the commands"
    if first == "help":
        said = f"there is no command help; write {slime_command(f'{words[1]} --help')}"
    elif not first:
        said = f"the command is missing; {do}, and {slime_command('train --help')} the flags of a run"
    elif first.startswith("-"):
        owner = command_with(first.partition("=")[0])
        said = f"{first} comes before a command; write {slime_command(f'{owner} {shlex.join(words)}')}"
        said = said if owner else f"unknown flag {first}; write the command first: {do}"
    else:
        near = nearest(first.removesuffix(".py").replace("_", "-"), names)
        said = f"there is no command {first}; " + (f"did you mean {slime_command(near)}? " if near else "") + do
    print(f"{slime_command('')}: {visible(said)}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """Raises `Terminated` on the first SIGTERM, so that a command removes its files and ends its processes."""

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Terminated(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _options(command: Command, words: list[str]) -> argparse.Namespace:
    if command.words == "all":
        _require_known(command, words[1:])
        return argparse.Namespace(command=command.name, words=words[1:])
    own = parser_of(command)
    options, more = own.parse_known_args(words[1:])
    options.command = command.name
    if command.words == "own" and more:
        own.unexpected(more)
    options.words = more
    _require_known(command, more)
    return options


def _require_known(command: Command, words: Sequence[str]) -> None:
    """Raises `ConfigError` for a flag of a different command, or a misspelt flag of this command.

    The loop does not know the flags of commands. Flags of users' registry entries are left to the loop.
    """
    from slime.settings.all_flags import components, entries_named_on, flag_table
    from slime.settings.public_flags import FOREIGN_NAMES
    from slime.settings.schema import owned_spellings

    own = [name for name in parser_of(command)._option_string_actions if name.startswith("--")]
    names = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    suspects = {n: _with_own(n) for n in names if n not in own and (_with_own(n) or nearest(n, own))}
    if not suspects or "--custom-config-path" in names or any(entries_named_on(words, components()).values()):
        return  # users' entries have more flags, and the file can name such entries
    table = flag_table()
    for name, owner in suspects.items():
        if name in table.by_name or name[2:] in FOREIGN_NAMES or name in owned_spellings():
            continue
        if owner is not None:
            raise ConfigError(f"unknown flag {name}; it is a flag of {slime_command(owner)}; drop it")
        if table.nearest(name) is None:
            raise ConfigError(f"unknown flag {name}; did you mean {nearest(name, own)}?")


if __name__ == "__main__":
    sys.exit(main())
