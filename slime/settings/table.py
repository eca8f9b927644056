"""The whole command line as one `FlagTable`: slime's groups, the entries of registries, Megatron, SGLang, router."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from slime.settings.components import Components, entries_named_in
from slime.settings.fields import declared, field_docs, flags_of
from slime.settings.flags import Flag, FlagTable
from slime.settings.groups import GROUPS
from slime.settings.schema import OWNED, flags_of_owner

if TYPE_CHECKING:
    from slime.settings.args import Args

UserEntries = tuple[tuple[str, str], ...]
"""(setting, import path) of entries that users name."""


@cache
def components(user_entries: UserEntries = ()) -> Components:
    """Slime's own settings, with those of users' entries. Raises `ConfigError` for a path at which none is."""
    return Components([group.settings for group in GROUPS], user_entries)


def components_of(args: Args) -> Components:
    """Slime's own settings, with those of the users' entries that resolved settings name."""
    named = entries_named_in({c.setting: getattr(args, c.setting) for c in components().choosers}, components())
    return components(tuple((setting, path) for setting, paths in named.items() for path in paths))


@cache
def own_flags(known: Components | None = None, *, with_docs: bool = False) -> tuple[Flag, ...]:
    """Slime's flags in --help order; the texts are read from the source only if wanted."""
    known = known or components()
    out: list[Flag] = []
    for group in GROUPS:
        docs = field_docs(group.settings) if with_docs else None
        out += flags_of(group.settings, heading=group.heading, docs=docs)
    return (*out, *known.flags(with_docs=with_docs))


@cache
def engine_flags(owner: str) -> tuple[Flag, ...]:
    """The flags of megatron, sglang or router that a user may give."""
    own = components().own if owner == "megatron" else {}
    spelled = {name for flag in own_flags() for name in flag.names}
    theirs = (f for f in flags_of_owner(owner) if f.dest not in OWNED[owner] and f.dest not in own)
    return tuple(f for f in theirs if spelled.isdisjoint(f.names))


@cache
def flag_table(known: Components | None = None) -> FlagTable:
    """All flags. Slime's own spelling wins where another owner has the same."""
    engines: Sequence[Flag] = [flag for owner in ("megatron", "sglang", "router") for flag in engine_flags(owner)]
    return FlagTable([*own_flags(known), *engines])


@cache
def secret_settings(known: Components | None = None) -> frozenset[tuple[str, str]]:
    """(owner, dest) of everything that is masked in records."""
    return frozenset((f.owner, f.dest) for f in flag_table(known).flags if f.secret)


def registered_names(flag: Flag) -> tuple[str, ...]:
    """The registered entries that one of slime's flags may name; none if it names no entry."""
    known = components()
    if flag.owner != "slime" or flag.dest not in known.own or not declared(known.own[flag.dest]).chosen_from:
        return ()
    return next(chooser.registry.names() for chooser in known.choosers if chooser.setting == flag.dest)
