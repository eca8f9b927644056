"""Cross-checks: what cannot work is refused before any process starts, all of it in one error.

A rule returns None, or what was got, because of what it cannot work, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slime.core.errors import ConfigError
from slime.settings import cross_rules
from slime.settings.args import Args
from slime.settings.components import Components
from slime.settings.effects import what_is_missing
from slime.settings.fields import declared
from slime.settings.group import Rule
from slime.settings.groups import GROUPS
from slime.settings.loop_rules import async_rules, sync_rules
from slime.settings.megatron_ranges import RANGES
from slime.settings.problems import refuse


def check_required(settings: Any, components: Components) -> None:
    """Raises `ConfigError` naming every required setting that is neither given nor derived."""
    wanted = {name: declared(field).required for name, field in components.own.items() if declared(field).required}
    missing = [text for name, text in wanted.items() if getattr(settings, name) in (None, "")]
    if missing:
        raise ConfigError("required settings are missing: " + "; ".join(missing))


def validate(args: Args, components: Components, *, synchronous: bool = True, problems: Iterable[str] = ()) -> None:
    """Raises one `ConfigError` with `problems` and everything else that cannot work."""
    rules: list[Rule] = [rule for group in GROUPS for rule in group.rules]
    rules += [*cross_rules.RULES, *(sync_rules() if synchronous else async_rules())]
    checks: list[Callable[[], Iterable[str | None]]] = [
        lambda: problems,
        lambda: out_of_range(args, components),
        *(lambda rule=rule: [rule(args)] for rule in rules),
        lambda: of_chosen_entries(args, components),
        lambda: without_effect(args),
    ]
    found: list[str] = []
    for check in checks:
        try:
            messages = [message for message in check() if message is not None]
        except ConfigError as error:  # of a value that several rules read: reported once
            messages = [str(error)]
        found += messages
    refuse(found)


def of_chosen_entries(args: Args, components: Components) -> Iterator[str]:
    """What the entries that act say of themselves."""
    for choice in components.chosen(args):
        if what_is_missing(choice.chooser.setting, args, components) is None:
            yield from choice.problems(args)


def out_of_range(settings: Any, components: Components) -> Iterator[str]:
    """Numbers that are given, or act, outside of the range of their declaration."""
    for name in (*components.own, *components.of_entries()):
        limits, value = declared(components.field_of(name, settings)).range, getattr(settings, name)
        if value is None or isinstance(value, bool) or not isinstance(value, (int, float)) or limits.holds(value):
            continue
        if settings.was_given(name) or what_is_missing(name, settings, components) is None:
            yield f"got {name} {value}, which must be {limits.text()} (see --help); correct it or leave it out"
    for name, limits in RANGES.items():
        value = settings.megatron.get(name)
        if settings.was_given(f"megatron.{name}") and value is not None and not limits.holds(value):
            yield f"got {name} {value}, which must be {limits.text()} (see --help megatron); correct it or leave it out"


def without_effect(args: Args) -> Iterator[str]:
    """With --strict, what would be ignored is refused."""
    if args.strict and args.idle:
        told = "; ".join(f"{name} {text}" for name, text in args.idle.items())
        yield f"got {told}: with --strict nothing is ignored; drop it or change the other"
