"""Parses command lines into `Args`, prints help texts, and reports a program's errors.

Does not import torch, transformers, Ray or an engine, so an invalid flag is reported immediately.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slime.core.errors import ConfigError, HookError, SlimeError, Terminated, Unfinished
from slime.core.registry import load_object
from slime.core.text import HIDDEN, program, visible
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
from slime.settings.args import MAPPINGS, NOT_A_SETTING, Args, Passthrough
from slime.settings.custom_yaml import Given, config_on, for_functions_listed, merge_config, words_behind
from slime.settings.flag_parser import OVERRIDE
from slime.settings.flags import FIRST_PAGE, Flag, refuse
from slime.settings.groups import GROUPS
from slime.settings.groups.training import OPTIMIZER_VALUES
from slime.settings.hook_contracts import CONTRACTS, check_hooks
from slime.settings.megatron import DOCS, FIXED, OF_CHECKPOINT, SLIME_DEFAULTS, UNSUPPORTED
from slime.settings.public_flags import FOREIGN_NAMES, tables
from slime.settings.resolve import passed_settings, resolve, without_effect
from slime.settings.roles import resolve_roles
from slime.settings.rules import likely_mistakes
from slime.settings.schema import load, owned_spellings


@paths_in_words()
def parse_args(argv: Sequence[str] | None = None, *, synchronous: bool = True) -> Args:
    """Returns the resolved settings of a run.

    `argv` defaults to `sys.argv[1:]`. `synchronous` selects the loop of train.py instead of train_async.py. For --help
    [topic], --version and --explain, prints the text and raises `SystemExit(0)`. Only --explain loads hooks, as
    starting a run would. Raises one `ConfigError` that lists all problems, or a `HookError`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    text = help_or_version(words, program("train" if synchronous else "train-async"))
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
    args = _with_replaced(args, found.replaced)
    args = args.replace(command=("slime", "train" if synchronous else "train-async", *words))
    if explain:
        check_hooks(args)
        _answer(explain_args(args))
    return args


def _with_replaced(args: Args, replaced: Mapping[tuple[str, str], str]) -> Args:
    """Adds values that later flags replaced to the settings without effect. Raises `ConfigError` (--strict)."""
    if not replaced:
        return args
    told = dict(args.idle)
    for (owner, dest), text in replaced.items():
        name = f"{owner}.{dest}"
        told[name] = f"{text}; {told[name]}" if name in told else text
    args = args.replace(idle=Passthrough("idle", told))
    refuse(list(without_effect(args)))
    return args


@dataclasses.dataclass(frozen=True, slots=True)
class _Parsed:
    known: Components
    """slime's settings, including those of users' registry entries."""
    given: Given
    origins: dict[tuple[str, str], str]
    custom: dict[str, Any]
    replaced: dict[tuple[str, str], str]
    """(owner, dest) -> an earlier value, and the later flag that replaces it."""


_NAMES = "slime.public.names:names_table"
"""Import path, because the import contract forbids importing it directly."""
EXPLAIN = "--explain"
"""Prints the settings of a run instead of starting it, and loads its hooks, as starting the run would."""


def parse_words(words: Sequence[str]) -> _Parsed:
    """Parses a command line and its --custom-config-path file. Checks each value by itself, but not combinations.

    Raises one `ConfigError` that lists all problems.
    """
    config = config_on(words)
    named = entries_named_in(config[1], components()) if config is not None else {}
    known = components_with(named | entries_named_on(words, components()))
    table = flag_table(known)
    replaced: dict[tuple[str, str], str] = {}
    given = table.parse(words, owned=owned_spellings(), elsewhere=FOREIGN_NAMES, replaced=replaced)
    origins = dict.fromkeys(given, "command line")
    custom: dict[str, Any] = {}
    if config is not None:
        replaced = table.parse(words_behind(words), owned=owned_spellings(), elsewhere=FOREIGN_NAMES)
        given, custom = merge_config(given, origins, table, *config, replaced=replaced)
    return _Parsed(known, given, origins, custom, replaced)


def main_args(argv: Sequence[str] | None = None, *, synchronous: bool = True) -> Args:
    """Calls `parse_args`. After a user error, prints one message to stderr and exits with code 2."""
    try:
        return parse_args(argv, synchronous=synchronous)
    except (ConfigError, HookError) as error:
        _stop(f"{type(error).__name__}: {error}", 2)


def run_or_exit(main: Callable[[Args], None], argv: Sequence[str] | None = None, *, synchronous: bool = True) -> None:
    """Parses the command line and runs `main(args)`. If either fails, prints one message to stderr.

    Exit codes: 0 success, 1 the run failed (its traceback is in the driver's log), 2 user error (`ConfigError`,
    `HookError`), 75 stopped early with a checkpoint (`AGAIN`), 130 Ctrl-C, 143 SIGTERM. Any other exception propagates.
    """
    logs = None
    try:
        args = main_args(argv, synchronous=synchronous)
        logs = Path(args.run_dir).resolve() / "logs"
        main(args)
    except (KeyboardInterrupt, Terminated, Unfinished, SlimeError) as end:
        report_and_exit(end, logs)


def report_and_exit(end: BaseException, logs: Path | None) -> NoReturn:
    """Prints the message for `end` and exits with the code listed in `run_or_exit`, or re-raises `end`.

    Call it in the `except` block that handles `end`.
    """
    if isinstance(end, KeyboardInterrupt | Terminated | Unfinished):
        said, code = ("terminated by SIGTERM", 143) if isinstance(end, Terminated) else ("interrupted", 130)
        if isinstance(end, Unfinished):
            said, code = "stopped early and not complete", int(str(end.code))
        where = f"; its files are in {logs.parent}" if logs is not None and logs.is_dir() else ""
        status = f" (exit status {code})" if isinstance(end, Unfinished) else ""
        _stop(f"{said}{status}; the run and all its processes have stopped{where}{_notes(end)}", code)
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

_TOPICS: Mapping[str, str] = {
    "optimizer": "Optimizer and learning rate (Megatron)",
    "slime": "all flags of slime",
    "megatron": "all flags of Megatron",
    "sglang": "all flags of SGLang (--sglang-...)",
    "router": "all flags of the router (--router-...)",
    "public": "what differs from the public slime, flag by flag",
    "all": "everything",
}
"""Topics other than the groups of settings -> what they show."""

_INTRO = """usage: {usage} --hf-checkpoint DIR --prompt-data FILE \\
           --rollout-batch-size N --num-rollout N [--flag value ...]

  --help                the flags that a first run needs, and the topics
  --help TOPIC          all flags of a topic
  --help WORD           the flags with this word in their name or text, such as --help clip
  --explain             load the hooks, print every resolved value and where it came from, then exit
  --version             print versions, then exit
  --override            later flags override earlier ones, and the file of an earlier --custom-config-path; without
                        it, two different values for one flag are an error, except for Megatron's model flags, where
                        the last one counts
"""
_AT_FILE = "Use @FILE to read the value from a file, because every user of the host can see command lines (ps)."


def topics() -> dict[str, str]:
    """Returns topic -> what --help shows for it."""
    out: dict[str, str] = {}
    for group in GROUPS:
        out[group.topic] = f"{out[group.topic]}; {group.heading}" if group.topic in out else group.heading
    return {**out, **_TOPICS}


def help_or_version(words: Sequence[str], usage: str = "slime train") -> str | None:
    """Returns the text for --help [topic] or --version; None if neither was given. `usage` is the command as typed."""
    if "--version" in words:
        import slime

        packages = ", ".join(load(owner)["package"] for owner in ("megatron", "sglang", "router"))
        return f"slime {slime.__version__} (flags of {packages})"
    for word in ("--help", "-h"):
        if word in words:
            following = words[words.index(word) + 1 :]
            asked = bool(following) and (not following[0].startswith("-") or len(following) == 1)
            return help_text(following[0] if asked else "", usage)
    return None


def help_text(topic: str, usage: str = "slime train") -> str:
    """Returns the text of a topic, or of the flags with this word; "" is the first page.

    Raises `ConfigError` if there is neither.
    """
    if topic == "public":
        return f"{tables()}\n\n{load_object(_NAMES)()}"
    if topic in ("", EXPLAIN, OVERRIDE, "--version", "--help", "-h"):
        return _first_page(usage)
    if topic not in topics():
        return _search(topic, usage)
    own = own_flags(with_docs=True)
    shown = own if topic in ("slime", "all") else [flag for flag in own if flag.topic == topic]
    parts = [_INTRO.format(usage=usage), *_sections(shown)]
    if topic == "optimizer":
        parts.append(_section(_TOPICS[topic], filter(_of_optimizer, engine_flags("megatron"))))
    for owner in ("megatron", "sglang", "router"):
        if topic in (owner, "all"):
            parts.append(_section(load(owner)["package"], engine_flags(owner)))
    if topic in ("hooks", "all"):
        parts.append(_hooks())
    return "\n".join(parts)


def _first_page(usage: str) -> str:
    shown = [flag for flag in (*own_flags(with_docs=True), *engine_flags("megatron")) if flag.first]
    parts = [_INTRO.format(usage=usage)]
    parts += [_section(heading, (flag for flag in shown if flag.first == heading)) for heading in FIRST_PAGE]
    known = topics()
    width = max(map(len, known)) + 2
    parts.append(f"Topics: {usage} --help TOPIC\n" + "\n".join(f"  {t:<{width}}{text}" for t, text in known.items()))
    return "\n".join(parts)


def _sections(flags: Sequence[Flag]) -> list[str]:
    """Groups the flags under headings: slime's flags by group, an engine's by package."""
    of: dict[str, list[Flag]] = {}
    for flag in flags:
        of.setdefault(flag.group if flag.owner == "slime" else load(flag.owner)["package"], []).append(flag)
    return [_section(heading, those) for heading, those in of.items()]


def _of_optimizer(flag: Flag) -> bool:
    scheduled = flag.dest.startswith("lr_") or "weight_decay" in flag.dest
    return "OptimizerConfig" in flag.configs or scheduled


def _search(word: str, usage: str) -> str:
    """Returns only the flag with this exact name, else the flags with this word in their name, else in their text."""
    every = [
        *own_flags(with_docs=True),
        *(f for owner in ("megatron", "sglang", "router") for f in engine_flags(owner)),
    ]
    every = [flag for flag in every if not flag.internal]
    plain = word.lower().replace("_", "-")
    exact = [flag for flag in every if plain in (*flag.names, *flag.off_names)]
    plain = plain.strip("-")
    by_name = [flag for flag in every if any(plain in name for name in (*flag.names, *flag.off_names))] if plain else []
    whole = re.compile(rf"\b{re.escape(plain)}\b", re.IGNORECASE)
    by_text = [flag for flag in every if flag not in by_name and whole.search(flag.doc)] if plain else []
    found = exact or by_name or by_text
    near = _near_topics(plain)
    if not found:
        do = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(topics())}"
        raise ConfigError(f"--help has no topic {word}, and no flag has this word in its name or text; {do}")
    told = [] if exact else [f"{word} is not a topic; flags with this word in their {'name' if by_name else 'text'}:"]
    told += ["Topics with similar names: " + ", ".join(f"{usage} --help {topic}" for topic in near)] if near else []
    more = [flag.names[0] for flag in by_text] if by_name and not exact else []
    end = [textwrap.fill(f"Also in the text of: {' '.join(more)}", 110, break_on_hyphens=False)] if more else []
    return "\n".join([*told, *([""] if told else []), *_sections(found), *end])


def _near_topics(word: str) -> list[str]:
    """Returns topics that the user may have meant, best first, at most three."""
    known = topics()
    spelled = [t for t in known if len(word) > 2 and (t.startswith(word) or word.startswith(t))]
    described = [t for t, text in known.items() if len(word) > 3 and word in text.lower().replace(" ", "-")]
    close = difflib.get_close_matches(word, known, 2, cutoff=0.7)
    return list(dict.fromkeys([*close, *spelled, *described]))[:3]


def _section(heading: str, flags: Iterable[Flag]) -> str:
    lines = [heading]
    for flag in flags:
        if flag.internal:
            continue
        lines.append(f"  {', '.join(flag.names)}{_value(flag)}{_off(flag)}")
        text = f"{flag.doc} {_AT_FILE}" if flag.secret else flag.doc
        default = default_shown(flag)
        if flag.owner == "megatron":
            text = DOCS.get(flag.dest, text)
            text = text if default == _default(flag.default, flag) else _THEIR_DEFAULT.sub("", text)
        text = f"{text} [{default}]" if default else text
        lines.append(textwrap.indent(textwrap.fill(text, 110, break_on_hyphens=False), "      "))
    return "\n".join(lines) + "\n"


_THEIR_DEFAULT = re.compile(r"\s*Defaults? to \S*?\.(?=\s|$)")
"""Megatron's sentence about its own default, which would contradict slime's."""


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
    choices = OPTIMIZER_VALUES.get(flag.dest) if flag.owner == "megatron" else None
    choices = choices or flag.choices
    if choices and len(choices) <= 8:
        return " {" + "|".join(map(str, choices)) + "}"
    return f" {flag.kind.upper()}" + (" ..." if flag.is_list else "")


def _off(flag: Flag) -> str:
    shown = [n for n in flag.off_names if flag.default is True or n != f"--no-{flag.names[0][2:]}"]
    return f" | {', '.join(shown)}" if shown else ""


def default_shown(flag: Flag) -> str:
    """Returns what --help says about a flag's default; "" if the flag's own text states it."""
    if flag.required or (flag.derived and flag.default is None):
        return ""
    if flag.derived:
        return f"{_default(flag.default, flag)}, unless derived"
    if flag.owner not in ("megatron", "sglang"):
        return _default(flag.default, flag)
    if flag.owner == "megatron" and flag.dest in FIXED | UNSUPPORTED:
        value, why = (FIXED | UNSUPPORTED)[flag.dest]
        return f"always {_default(value, flag).removeprefix('default ')}: {why}"
    if flag.owner == "megatron" and flag.dest in OF_CHECKPOINT:
        return "from the checkpoint's config.json"
    value = SLIME_DEFAULTS[flag.dest][0] if flag.owner == "megatron" and flag.dest in SLIME_DEFAULTS else flag.default
    told = _default(value, flag)
    if value != flag.default:
        told += f"; Megatron's is {_default(flag.default, flag).removeprefix('default ')}"
    passed = passed_settings().get((flag.owner, flag.dest))
    if passed is None:
        return told
    why = passed.why if isinstance(passed.why, str) else "see --explain"
    return f"derived: {why}" if value is None else f"{told}, unless derived: {why}"


def _default(value: Any, flag: Flag) -> str:
    if flag.kind == "bool":
        return "on" if value else "off"
    return "none" if value is None else f"default {json_line(value)}"


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
    if read := for_functions_listed(args):
        told += ["Read only by your functions:", *(f"  {text}" for text in read), ""]
    if mistakes := likely_mistakes(args):
        told += ["Probably not what you want:", *(f"  {text}" for text in mistakes), ""]
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
