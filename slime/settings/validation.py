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
from slime.settings.problems import refuse
from slime.settings.ranges import ANY


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
        lambda: derived_out_of_range(args, components),
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


def given_out_of_range(settings: Any, components: Components) -> Iterator[str]:
    """Numbers that the user gave to entries, outside of the range that the chosen ones declare."""
    for name in components.of_entries():
        if settings.was_given(name) and (problem := _problem_of(name, settings, components)) is not None:
            where = settings.origins[name]
            where = "--" + name.replace("_", "-") if where == "command line" else f"{where}: {name}"
            yield f"{where}: got {getattr(settings, name)}, {problem}; correct it or leave it out"


def derived_out_of_range(settings: Any, components: Components) -> Iterator[str]:
    """Derived numbers that act and are outside of the range of their declaration, with what made them."""
    for name in (*components.own, *components.of_entries()):
        problem = None if settings.was_given(name) else _problem_of(name, settings, components)
        if problem is not None and what_is_missing(name, settings, components) is None:
            reason = settings.origins[name].removeprefix("derived: ")
            do = f"give --{name.replace('_', '-')}, or change that"
            yield f"got {name} {getattr(settings, name)}, derived from {reason}, {problem}; {do}"


def _problem_of(name: str, settings: Any, components: Components) -> str | None:
    limits = declared(components.field_of(name, settings)).range
    return None if limits == ANY else limits.problem(getattr(settings, name))


def without_effect(args: Args) -> Iterator[str]:
    """With --strict, what would be ignored is refused."""
    if args.strict and args.idle:
        told = "; ".join(f"{name} {text}" for name, text in args.idle.items())
        yield f"got {told}: with --strict nothing is ignored; drop it or change the other"
