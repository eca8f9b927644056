"""`slime <command>`: the entry point.

A command is a row of `COMMANDS` with `add_flags(parser)` and `run(options) -> int` from a file in this folder. `run`
checks its arguments before heavy imports, so help and errors appear immediately.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slime.cli import (
    convert,
    doctor,
    inspect_run,
    loop_commands,
    recipe,
    rerun,
    schemas,
    serve,
    tokenizer,
    upgrade_check,
)
from slime.core.errors import SlimeError, Terminated
from slime.core.text import program, visible
from slime.core.user_files import path_in_words


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
        loop_commands.add_flags,
        loop_commands.run_sync,
        words="all",
    ),
    Command(
        "train-async",
        "train while generating (train_async.py)",
        loop_commands.add_flags,
        loop_commands.run_async,
        words="all",
    ),
    Command(
        "serve", "serve engines and router without training, until Ctrl-C", serve.add_flags, serve.run, words="more"
    ),
    Command("rerun", "repeat a run with the settings recorded in its folder", rerun.add_flags, rerun.run, words="more"),
    Command("recipe", "run a recipe that comes with slime", recipe.add_flags, recipe.run, words="more"),
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
        "convert",
        "convert a Hugging Face folder, a checkpoint or a torch_dist folder to a Hugging Face or torch_dist folder; "
        "or a rollout X.pt to X.jsonl.zst",
        convert.add_flags,
        convert.run,
    ),
    Command(
        "tokenizer",
        "write a tokenizer.json for a folder whose tokenizer is code",
        tokenizer.add_flags,
        tokenizer.run,
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


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program(), description="LLM post-training for RL scaling.")
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
        build_parser().parse_args(words)  # prints help, or an error with the known commands
        return 2
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
        return argparse.Namespace(command=command.name, words=words[1:])
    if command.words == "own":
        return build_parser().parse_args(words)
    options, more = build_parser().parse_known_args(words)
    options.words = more
    return options


if __name__ == "__main__":
    sys.exit(main())
