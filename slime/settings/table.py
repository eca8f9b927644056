"""The whole command line as one `FlagTable`: slime's groups, Megatron, SGLang, router."""

from __future__ import annotations

from functools import cache

from slime.settings.fields import field_docs, flags_of
from slime.settings.flags import Flag, FlagTable
from slime.settings.groups import HEADINGS
from slime.settings.schema import OWNED, flags_of_owner


@cache
def own_flags(*, with_docs: bool = False) -> tuple[Flag, ...]:
    """Slime's flags in --help order; the texts are read from the source only if wanted."""
    out: list[Flag] = []
    for group, heading in HEADINGS.items():
        out += flags_of(group, heading=heading, docs=field_docs(group) if with_docs else None)
    return tuple(out)


@cache
def engine_flags(owner: str) -> tuple[Flag, ...]:
    """The flags of megatron, sglang or router that a user may give."""
    own = {f.dest for f in own_flags()} if owner == "megatron" else set()
    return tuple(f for f in flags_of_owner(owner) if f.dest not in OWNED[owner] and f.dest not in own)


@cache
def flag_table() -> FlagTable:
    """All flags. Slime's own spelling wins where another owner has the same."""
    return FlagTable([*own_flags(), *engine_flags("megatron"), *engine_flags("sglang"), *engine_flags("router")])


@cache
def secret_settings() -> frozenset[tuple[str, str]]:
    """(owner, dest) of everything that is masked in records."""
    return frozenset((f.owner, f.dest) for f in flag_table().flags if f.secret)
