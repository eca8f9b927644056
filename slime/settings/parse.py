"""From a command line to `Args`: parse, read YAML, take the model's architecture from the checkpoint, derive, check.

Imports no torch, transformers, Ray or engine, so that a wrong flag is answered at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slime.core.errors import ConfigError, HookError, SlimeError
from slime.settings.args import Args
from slime.settings.derive import DERIVATIONS, Draft
from slime.settings.families import architecture_of, contradictions
from slime.settings.megatron_defaults import SLIME_DEFAULTS
from slime.settings.schema import flags_of_owner, owned_spellings
from slime.settings.settings import Settings
from slime.settings.table import flag_table, own_flags

Given = dict[tuple[str, str], Any]
"""(owner, dest) -> value, as the user gave it."""


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
    given = flag_table().parse(words, owned=owned_spellings())
    args = resolve(given, synchronous=synchronous)
    if explain:
        _answer(answers.explain(args))
    return args


def main_args(argv: Sequence[str] | None = None, *, synchronous: bool = True) -> Args:
    """`parse_args` for a script: a user's error is one message on stderr and exit code 2, without a traceback."""
    try:
        return parse_args(argv, synchronous=synchronous)
    except (ConfigError, HookError) as error:
        _stop(f"{type(error).__name__}: {error}", 2)


def run_or_exit(main: Callable[[Args], None], argv: Sequence[str] | None = None, *, synchronous: bool = True) -> None:
    """Parses the command line and runs `main(args)`; what ends either is told in one message on stderr.

    Exit codes: 0 done, 1 the run failed (its traceback is in the driver's log), 2 the user's mistake (`ConfigError`,
    `HookError`), 130 Ctrl-C. An error that is none of ours keeps its traceback.
    """
    logs = None
    try:
        args = main_args(argv, synchronous=synchronous)
        logs = Path(args.run_dir).resolve() / "logs"
        main(args)
    except KeyboardInterrupt:
        where = f"; what it recorded is in {logs.parent}" if logs is not None and logs.is_dir() else ""
        _stop(f"interrupted; the run and all its processes are ended{where}", 130)
    except (ConfigError, HookError) as error:
        _stop(f"{type(error).__name__}: {error}", 2)
    except SlimeError as error:
        _stop(f"{type(error).__name__}: {error}\nlogs of every process: {logs}", 1)


def _stop(message: str, code: int) -> NoReturn:
    """Ends the process; the exception that is being handled has been told, so it prints no traceback."""
    sys.stderr.write(message + "\n")
    raise SystemExit(code) from None


def resolve(given: Given, *, synchronous: bool = True) -> Args:
    """Settings as given -> `Args`: YAML, defaults, checkpoint, derivations, cross-checks. Raises `ConfigError`."""
    from slime.settings.custom_yaml import merge_custom_config
    from slime.settings.validation import check_required, validate

    origins = {key: "command line" for key in given}
    given, custom = merge_custom_config(given, origins)
    draft = _defaults(given, origins)
    check_required(draft.values)
    problems = _take_architecture(draft)
    for derivation in DERIVATIONS:
        derivation(draft)
    router = {dest: value for (owner, dest), value in given.items() if owner == "router"}
    args = Args(
        **draft.values,
        megatron=Settings("megatron", draft.megatron),
        sglang=Settings("sglang", draft.sglang),
        router=Settings("router", router),
        custom=Settings("custom", custom),
        origins=Settings("origins", draft.origins),
    )
    validate(args, synchronous=synchronous, problems=problems)
    return args


def _defaults(given: Given, origins: Mapping[tuple[str, str], str]) -> Draft:
    """Defaults of slime and Megatron overlaid with what was given."""
    own = {flag.dest for flag in own_flags()}
    draft = Draft({}, {}, {d: v for (owner, d), v in given.items() if owner == "sglang"})
    for flag in own_flags():
        draft.values[flag.dest] = flag.default
        draft.origins[flag.dest] = "default"
    for flag in flags_of_owner("megatron"):
        if flag.dest in own:
            continue
        draft.megatron[flag.dest] = flag.default
        draft.origins[f"megatron.{flag.dest}"] = "default of Megatron"
    for name, (value, why) in SLIME_DEFAULTS.items():
        draft.megatron[name] = value
        draft.origins[f"megatron.{name}"] = f"default of slime: {why}"
    for (owner, dest), value in given.items():
        name = dest if owner == "slime" else f"{owner}.{dest}"
        draft.given.add(name)
        draft.origins[name] = origins[owner, dest]
        if owner == "slime":
            draft.values[dest] = value
        elif owner == "megatron":
            draft.megatron[dest] = value
    return draft


def _take_architecture(draft: Draft) -> list[str]:
    """Takes the model's architecture from the checkpoint; returns contradictions with flags."""
    architecture = architecture_of(draft.values["hf_checkpoint"], draft.values["model_family"])
    explicit = {
        n.removeprefix("megatron."): draft.megatron[n.removeprefix("megatron.")]
        for n in draft.given
        if n.startswith("megatron.")
    }
    problems = contradictions(architecture, explicit)
    for name, value in architecture.items():
        draft.megatron[name] = value
        draft.origins[f"megatron.{name}"] = "HF config"
    return problems


def _answer(text: str) -> NoReturn:
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    raise SystemExit(0)
