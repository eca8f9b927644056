"""What --help, --version and --explain print."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from slime.core.errors import ConfigError
from slime.core.text import HIDDEN
from slime.settings.args import MAPPINGS, NOT_A_SETTING, Args
from slime.settings.flags import Flag
from slime.settings.hook_contracts import CONTRACTS
from slime.settings.public_flags import tables
from slime.settings.schema import load
from slime.settings.table import components_of, engine_flags, own_flags, registered_names, secret_settings

TOPICS = ("slime", "megatron", "sglang", "router", "hooks", "public", "all")

_INTRO = """usage: python train.py --hf-checkpoint DIR --prompt-data FILE \\
           --rollout-batch-size N --num-rollout N [--flag value ...]

  --help [slime|megatron|sglang|router|hooks|all]   flags of slime (default), of an engine, the hooks, or all
  --help public                                     what differs from the public slime, flag by flag
  --explain                                         print every resolved value and where it came from, then exit
  --version                                         print versions, then exit
  --override                                        flags behind it replace those before it; without it, a setting that
                                                    is given twice has one value
"""


_AT_FILE = "@FILE reads it from a file: everybody on the host sees a command line (ps)."


def help_or_version(words: Sequence[str]) -> str | None:
    """The text that answers --help [topic] or --version; None if neither was asked for."""
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
    """Help on one topic. Raises `ConfigError` on an unknown one."""
    if topic not in TOPICS:
        raise ConfigError(f"got --help {topic}; topics are {', '.join(TOPICS)}")
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
    """What slime calls every kind of hook with."""
    lines = ["Hooks: what slime calls your code with; names in [] are passed only if it takes them"]
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


def explain(args: Args) -> str:
    """Every resolved value and its origin, one line each: what differs from the defaults comes first."""
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
    told = ["Given, without effect:", *idle, ""] if idle else []
    return "\n".join([*told, "Given, read and derived:", *lines[False], "", "Defaults:", *lines[True]])


def json_line(value: Any) -> str:
    """A value on one line."""
    return json.dumps(value, default=list) if isinstance(value, (dict, list, tuple)) else str(value)
