"""Fields of slime's own settings: how they are declared, and the flags and help texts made from them.

A group is a frozen dataclass whose fields are documented by the string literal below them. That literal is the only
copy of the text: --help reads it from the source, and only when help is asked for.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from slime.settings.flags import Flag


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """The condition under which a setting acts."""

    acts: Callable[[Any], bool]
    """Of the resolved settings."""
    text: str
    """The condition in words, after "which needs"."""


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """What a number may be; None is no bound."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None


def opt(
    default: Any,
    *,
    names: tuple[str, ...] = (),
    off_names: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
    secret: bool = False,
    append: bool = False,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    needs: Need | tuple[Need, ...] = (),
    chosen_from: str | None = None,
) -> Any:
    """A field with more than a default.

    `names`, `off_names`: other spellings, and spellings that switch it off. `append`: a tuple to which each occurrence
    of the flag adds one entry. `gt`, `ge`, `lt`, `le`: bounds of a number. `needs`: when it acts. `chosen_from`: the
    value names an entry of the registry at this import path, `pkg.module:REGISTRY`.
    """
    metadata = {
        "names": names,
        "off_names": off_names,
        "choices": choices,
        "secret": secret,
        "append": append,
        "range": Range(gt, ge, lt, le),
        "needs": (needs,) if isinstance(needs, Need) else needs,
        "chosen_from": chosen_from,
    }
    if isinstance(default, (dict, list)):
        frozen = default
        return dataclasses.field(default_factory=lambda: type(frozen)(frozen), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def derived(
    compute: Callable[[Any], Any] | None = None,
    why: str | Callable[[Any], str] = "",
    *,
    names: tuple[str, ...] = (),
    off_names: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    needs: Need | tuple[Need, ...] = (),
    chosen_from: str | None = None,
) -> Any:
    """A field that is computed from others when the user does not give it.

    `compute` gets the settings, each derived when it is read; `why` is told by --explain. The rest as in `opt`.
    """
    metadata = {
        "names": names,
        "off_names": off_names,
        "choices": choices,
        "derived": True,
        "compute": compute,
        "why": why,
        "range": Range(gt, ge, lt, le),
        "needs": (needs,) if isinstance(needs, Need) else needs,
        "chosen_from": chosen_from,
    }
    return dataclasses.field(default=None, metadata=metadata)


def internal(default: Any = None) -> Any:
    """A field that the run fills in; it has no flag."""
    return dataclasses.field(default=default, metadata={"internal": True})


def _kind(hint: Any) -> tuple[str, str | None, tuple[Any, ...] | None, bool]:
    """(kind, nargs, choices, optional) of a type annotation."""
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [a for a in typing.get_args(hint) if a is not type(None)]
        assert len(members) == 1, f"a field's type is one type or None, got {hint}"
        hint, optional = members[0], True
    origin = typing.get_origin(hint)
    if origin is Literal:
        return "str", None, typing.get_args(hint), optional
    if origin is tuple:
        return _kind(typing.get_args(hint)[0])[0], "+", None, optional
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        return "json", None, None, optional
    simple = {int: "int", float: "float", str: "str", bool: "bool"}
    assert hint in simple, f"no flag for a field of type {hint}"
    return simple[hint], None, None, optional


def flags_of(group: type, *, heading: str, docs: Mapping[str, str] | None = None) -> list[Flag]:
    """The flags of the fields that `group` itself declares; `docs` are their help texts, if wanted."""
    hints = typing.get_type_hints(group)
    out = []
    for field in dataclasses.fields(group):
        if field.name not in inspect.get_annotations(group):
            continue
        meta = field.metadata
        kind, nargs, choices, optional = _kind(hints[field.name])
        dashed = field.name.replace("_", "-")
        off = tuple(meta.get("off_names", ()))
        if kind == "bool" and not dashed.startswith(("no-", "disable-", "skip-")):
            off = (*off, f"--no-{dashed}")
        factory: Any = field.default_factory
        out.append(
            Flag(
                dest=field.name,
                owner="slime",
                names=(f"--{dashed}", *meta.get("names", ())),
                kind=kind,
                default=field.default if factory is dataclasses.MISSING else factory(),
                doc=(docs or {}).get(field.name, ""),
                group=heading,
                off_names=off,
                nargs=None if meta.get("append") else nargs,
                append=bool(meta.get("append")),
                choices=meta.get("choices") or choices,
                optional=optional,
                derived=bool(meta.get("derived")),
                secret=bool(meta.get("secret")),
                internal=bool(meta.get("internal")),
            )
        )
    return out


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string literal below it, read from the source of `cls` itself (not of its bases)."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef), f"{cls} is not a class"
    out = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            out[statement.target.id] = " ".join(following.value.value.split())
    return out
