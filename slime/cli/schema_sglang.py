"""SGLang's and the router's settings as data, read from the argument parsers of the installed packages.

`python -m slime.cli.schemas --write` stores what these functions return. Names are the engines' own; the prefixes
--sglang- and --router- are added when the files are read. A deprecated flag keeps its own name, so that what the user
wrote is what the engine gets.
"""

from __future__ import annotations

import argparse
from typing import Any

_KINDS = {"int": "int", "float": "float", "str": "str", "nullable_str": "str", "human_readable_int": "human_int"}


def _entry(action: argparse.Action) -> dict[str, Any] | None:
    """The schema entry of one parser action; None for what is not a setting."""
    if not action.option_strings or action.dest in ("help", "version") or type(action).__name__ == "DeprecatedAction":
        return None
    names = [n.removeprefix("--") for n in action.option_strings if n.startswith("--")]
    deprecated = type(action).__name__.startswith("Deprecated")
    off_names: list[str] = []
    if action.nargs == 0:
        kind = "bool"
        if isinstance(action, argparse.BooleanOptionalAction):
            off_names, names = [n for n in names if n.startswith("no-")], [n for n in names if not n.startswith("no-")]
    else:
        # Anything with a parser of its own (JSON, graph descriptions) is passed on as the user wrote it.
        kind = _KINDS.get(getattr(action.type, "__name__", "str"), "str")
    default = action.default if isinstance(action.default, (bool, int, float, str)) else None
    if default == argparse.SUPPRESS or deprecated:
        default = None
    entry: dict[str, Any] = {"dest": names[0].replace("-", "_") if deprecated else action.dest, "kind": kind}
    entry |= {"names": names, "default": default, "doc": " ".join((action.help or "").split())}
    optional: dict[str, Any] = {
        "off_names": off_names,
        "nargs": None if action.nargs in (0, None) else str(action.nargs),
    }
    optional |= {"choices": _choices(action), "deprecated": deprecated}
    optional |= {"append": type(action).__name__ == "_AppendAction"}
    return entry | {k: v for k, v in optional.items() if v}


def _choices(action: argparse.Action) -> list[Any] | None:
    """In the order of the parser; a set has none, so it is sorted to give every host the same file."""
    if not action.choices:
        return None
    words = list(action.choices)
    return sorted(words) if isinstance(action.choices, (set, frozenset)) or "parser" in action.dest else words


def _entries(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    found = [e for e in map(_entry, parser._actions) if e is not None]
    return sorted(found, key=lambda e: e["dest"])


def build_sglang() -> dict[str, Any]:
    """The schema of the installed SGLang. Imports it (seconds); on a CPU its stand-ins must be active already."""
    from importlib.metadata import version

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    return {"package": f"sglang {version('sglang')}", "flags": _entries(parser)}


def build_router() -> dict[str, Any]:
    """The schema of the installed sglang-router."""
    from importlib.metadata import version

    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    return {"package": f"sglang-router {version('sglang-router')}", "flags": _entries(parser)}
