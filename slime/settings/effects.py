"""Settings that are given and act on nothing: listed when the run starts, refused with --strict.

Such a setting is resolved as if it had not been given, so that it is without effect wherever it is read.

A setting acts if the conditions of its declaration hold and, if it belongs to entries of a registry, one of them is
chosen. What an engine's flag needs is in `megatron_effects`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from slime.core.text import HIDDEN
from slime.settings.components import Components
from slime.settings.fields import Need, declared
from slime.settings.flags import Flag
from slime.settings.megatron_defaults import FIXED, SLIME_DEFAULTS
from slime.settings.megatron_effects import NEEDS

if TYPE_CHECKING:
    from slime.settings.args import Args
    from slime.settings.resolver import Resolver


def own_settings_without_effect(settings: Resolver, components: Components) -> dict[str, str]:
    """Setting -> its given value (a secret masked) and what it needs, for slime's settings and those of entries."""
    out = {}
    for name in (*components.own, *components.of_entries()):
        says, value = declared(components.field_of(name, settings)), settings.given(name)
        if settings.was_given(name) and says.asks(value):
            text = what_is_missing(name, settings, components)
            if text is not None:
                out[name] = f"{HIDDEN if says.secret else value}, which needs {text}"
    return out


def what_is_missing(name: str, settings: Any, components: Components) -> str | None:
    """The first condition of a setting that does not hold, in words; None if it acts."""
    needs = declared(components.field_of(name, settings)).conditions
    missing = _first_missing(needs, settings)
    if missing is not None or name in components.own:
        return missing
    chosen = {choice.entry: choice.chooser for choice in components.chosen(settings)}
    readers = [reader for reader in components.readers(name) if reader.entry in chosen]
    if not readers:
        return " or ".join(_choices_with(name, components))
    texts = [_first_missing(declared(components.own[r.chooser.setting]).conditions, settings) for r in readers]
    return None if None in texts else texts[0]


def _first_missing(needs: tuple[Need, ...], settings: Any) -> str | None:
    return next((need.text for need in needs if not need.acts(settings)), None)


def _choices_with(name: str, components: Components) -> Iterator[str]:
    """`setting a or b` for each setting that chooses entries which have the field; with the entry's own switch."""
    by_chooser: dict[str, dict[str, None]] = {}
    for reader in components.readers(name):
        switch = getattr(reader.entry, "switch", "")
        label = f"{reader.label} ({switch})" if switch else reader.label
        by_chooser.setdefault(reader.chooser.what, {})[label] = None
    for what, labels in by_chooser.items():
        yield f"{what} {' or '.join(labels)}"


def engine_settings_without_effect(args: Args, flags: Iterable[Flag]) -> dict[str, str]:
    """The same for flags of Megatron; one that is given its default, Megatron's or slime's, asks for nothing."""
    out = {}
    for flag in flags:
        need, value = NEEDS.get(flag.dest), args.megatron.get(flag.dest)
        if need is None or not args.was_given(f"megatron.{flag.dest}") or need.acts(args):
            continue
        usual = FIXED[flag.dest][:1] if flag.dest in FIXED else (flag.default, *SLIME_DEFAULTS.get(flag.dest, ())[:1])
        if value not in usual:
            out[f"megatron.{flag.dest}"] = f"{HIDDEN if flag.secret else value}, which needs {need.text}"
    return out
