"""Builds the `FlagTable` of the whole command line: slime's groups, registry entries, Megatron, SGLang, router.

A group's field declared with `chosen_from` selects an entry of a registry (`slime.core.registry`), by its registered
name or by the import path of a user's class. The fields of entries are settings too. A field that several entries
inherit from one base class is a single setting. An entry can redeclare the field to change its default or derivation;
the redeclaration applies when that entry is chosen.

Invariants
1. Each setting is declared by exactly one group or one base class of entries. If two base classes declare the same
   name, an error is raised.
2. If an entry's field has the same name as a group's setting, the field takes that setting's value.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.registry import Registry, load_object
from slime.settings.fields import ChosenBy, declared, field_docs, flags_of, own_fields
from slime.settings.flag_parser import FlagTable
from slime.settings.flags import ANY, Flag
from slime.settings.groups import GROUPS
from slime.settings.schema import OWNED, flags_of_owner

if TYPE_CHECKING:
    from slime.settings.args import Args

Fields = dict[str, dataclasses.Field[Any]]


@dataclass(frozen=True, slots=True)
class Chooser:
    """A setting whose value selects registry entries."""

    setting: str
    registry: Registry[Any]
    chosen_by: ChosenBy | None = None

    def names(self, settings: Any) -> tuple[str, ...]:
        return named(getattr(settings, self.setting) if self.chosen_by is None else self.chosen_by.name(settings))

    @property
    def what(self) -> str:
        """Returns the noun that messages put before a name."""
        return self.setting if self.chosen_by is None else self.chosen_by.what


@dataclass(frozen=True, slots=True)
class Reader:
    """A registry entry that declares or inherits a field."""

    chooser: Chooser
    entry: type
    label: str
    """The entry's registered name, or the import path that the user gave."""
    field: dataclasses.Field[Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """A registry entry selected by the settings."""

    chooser: Chooser
    name: str
    entry: type

    def problems(self, settings: Any) -> list[str]:
        """Calls the entry's `check(settings) -> str | None`, if it has one. Returns a list of at most one message."""
        if not hasattr(self.entry, "check"):
            return []
        message = self.chooser.registry.build(self.name, settings).check(settings)
        if message is None or isinstance(message, str):
            return [message] if message else []
        kind = type(message).__name__
        return [f"check() of {self.chooser.what} {self.name} returned a {kind}; it must return a message or None"]


class Components:
    """The settings of slime's groups and registry entries, by name."""

    def __init__(self, groups: Sequence[type], user_entries: Iterable[tuple[str, str]] = ()) -> None:
        """Collects the settings. `user_entries` are (setting, import path) pairs of entries to load.

        Raises `ConfigError` if a path does not lead to an entry, or if two base classes declare the same field.
        """
        self.groups = tuple(groups)
        declarations = [field for group in self.groups for field in own_fields(group)]
        self.own: Fields = {field.name: field for field in declarations}
        doubled = [name for name, count in Counter(field.name for field in declarations).items() if count > 1]
        assert not doubled, f"two groups declare {doubled}"
        self.choosers = tuple(
            Chooser(name, _registry(path), declared(field).chosen_by)
            for name, field in self.own.items()
            if (path := declared(field).chosen_from)
        )
        self._readers: dict[str, list[Reader]] = {}
        self._roots: dict[str, type] = {}
        for chooser in self.choosers:
            built_in = f"{chooser.registry.package}."
            for entry in dict.fromkeys(entry for _, entry in chooser.registry):
                if f"{entry.__module__}.".startswith(built_in):  # user entries are added only if named
                    self._add(chooser, entry, str(entry.name))
        for setting, path in user_entries:
            chooser = next(c for c in self.choosers if c.setting == setting)
            self._add(chooser, chooser.registry.get(path), path)

    def knows(self, name: str) -> bool:
        """Returns whether a group or an entry has a setting with this name."""
        return name in self.own or name in self._readers

    def of_entries(self) -> tuple[str, ...]:
        """Returns the names of settings that only entries declare."""
        return tuple(self._readers)

    def readers(self, name: str) -> tuple[Reader, ...]:
        """Returns the entries that have this setting."""
        return tuple(self._readers.get(name, ()))

    def chosen(self, settings: Any) -> Iterator[Choice]:
        """Yields the chosen entries. Raises `ConfigError` for an unknown name."""
        for chooser in self.choosers:
            yield from self._choices(chooser, settings)

    def field_of(self, name: str, settings: Any) -> dataclasses.Field[Any]:
        """Returns the declaration of a setting; if several entries declare it, that of the chosen entry."""
        if name in self.own:
            return self.own[name]
        readers = self._readers[name]
        for reader in readers:
            if any(choice.entry is reader.entry for choice in self._choices(reader.chooser, settings)):
                return reader.field
        return readers[0].field

    def flags(self, *, with_docs: bool = False) -> list[Flag]:
        """Returns the flags of entries' settings. `with_docs` also reads their help texts from the source."""
        out = []
        for name, readers in self._readers.items():
            root, registry = self._roots[name], readers[0].chooser.registry
            docs = field_docs(root) if with_docs else {}
            if with_docs:
                labels = ", ".join(dict.fromkeys(reader.label for reader in readers))
                docs[name] = f"{docs.get(name, '')} Used by {labels}.".strip()
            heading = f"{registry.what.capitalize()}: settings of {registry.flag} entries"
            out += [
                dataclasses.replace(flag, limits=ANY)
                for flag in flags_of(root, heading=heading, docs=docs)
                if flag.dest == name
            ]
        return sorted(out, key=lambda flag: flag.group)

    @staticmethod
    def _choices(chooser: Chooser, settings: Any) -> Iterator[Choice]:
        for name in chooser.names(settings):
            if chooser.chosen_by is not None and name not in chooser.registry:
                known = ", ".join(chooser.registry.names())
                what = chooser.registry.what
                raise ConfigError(f"there is no {what} for {chooser.what} {name}; choose from {known}")
            yield Choice(chooser, name, chooser.registry.get(name))

    def _add(self, chooser: Chooser, entry: type, label: str) -> None:
        known = any(reader.entry is entry for readers in self._readers.values() for reader in readers)
        if known or not dataclasses.is_dataclass(entry):
            return
        for field in dataclasses.fields(entry):
            if field.name in self.own or not field.init:
                continue
            root = [c for c in entry.__mro__ if field.name in vars(c).get("__annotations__", {})][-1]
            if self._roots.setdefault(field.name, root) is not root:
                raise ConfigError(
                    f"{root.__qualname__} and {self._roots[field.name].__qualname__} both declare the setting "
                    f"{field.name} and would share a flag; let both inherit it from one base class, or rename one"
                )
            self._readers.setdefault(field.name, []).append(Reader(chooser, entry, label, field))


def named(value: Any) -> tuple[str, ...]:
    """Returns the entry names in a setting's value, which is None, one name or several."""
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return () if value is None else (value,)


def entries_named_on(words: Sequence[str], components: Components) -> dict[str, tuple[str, ...]]:
    """Returns setting -> import paths of user entries named on a command line. Ignores all other flags."""
    spellings = {f"--{c.setting.replace('_', '-')}": c for c in components.choosers}
    out: dict[str, tuple[str, ...]] = {}
    for position, word in enumerate(words):
        flag, inline, value = word.partition("=")
        chooser = spellings.get("--" + flag[2:].replace("_", "-")) if flag.startswith("--") else None
        if chooser is None:
            continue
        end = next((i for i in range(position + 1, len(words)) if words[i].startswith("--")), len(words))
        out[chooser.setting] = _paths(chooser, [value] if inline else words[position + 1 : end])
    return out


def entries_named_in(content: Mapping[str, Any], components: Components) -> dict[str, tuple[str, ...]]:
    """Returns setting -> import paths of user entries named in a settings file."""
    plain = {str(key).replace("-", "_"): value for key, value in content.items()}
    found = {c: plain[c.setting] for c in components.choosers if c.setting in plain}
    return {c.setting: _paths(c, [v for v in named(value) if isinstance(v, str)]) for c, value in found.items()}


def _paths(chooser: Chooser, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(n for n in names if ("." in n or ":" in n) and n not in chooser.registry)


@cache
def _registry(path: str) -> Registry[Any]:
    found = load_object(path)
    assert isinstance(found, Registry), f"{path} is not a registry"
    return found


UserEntries = tuple[tuple[str, str], ...]
"""(setting, import path) of user entries."""


@cache
def components(user_entries: UserEntries = ()) -> Components:
    """Returns slime's settings, including those of `user_entries`. Raises `ConfigError` for a path without an entry."""
    return Components([group.settings for group in GROUPS], user_entries)


def components_with(named: Mapping[str, tuple[str, ...]]) -> Components:
    """Calls `components` with the import paths returned by `entries_named_on` and `entries_named_in`."""
    return components(tuple((setting, path) for setting, paths in named.items() for path in paths))


def components_of(args: Args) -> Components:
    """Calls `components` with the user entries named in resolved settings."""
    values = {c.setting: getattr(args, c.setting) for c in components().choosers}
    return components_with(entries_named_in(values, components()))


@cache
def own_flags(known: Components | None = None, *, with_docs: bool = False) -> tuple[Flag, ...]:
    """Returns slime's flags in --help order. `with_docs` also reads their help texts from the source."""
    known = known or components()
    out: list[Flag] = []
    for group in GROUPS:
        docs = field_docs(group.settings) if with_docs else None
        flags = flags_of(group.settings, heading=group.heading, docs=docs)
        out += [dataclasses.replace(flag, topic=group.topic) for flag in flags]
    topics = {flag.dest: flag.topic for flag in out}
    of_entries = known.flags(with_docs=with_docs)
    return (*out, *(dataclasses.replace(f, topic=topics[known.readers(f.dest)[0].chooser.setting]) for f in of_entries))


@cache
def engine_flags(owner: str) -> tuple[Flag, ...]:
    """Returns the flags of megatron, sglang or router that users can set."""
    own = components().own if owner == "megatron" else {}
    spelled = {name for flag in own_flags() for name in flag.names}
    theirs = (f for f in flags_of_owner(owner) if f.dest not in OWNED[owner] and f.dest not in own)
    return tuple(f for f in theirs if spelled.isdisjoint(f.names))


@cache
def flag_table(known: Components | None = None) -> FlagTable:
    """Returns all flags. If slime and an engine define a flag with the same name, slime's takes precedence."""
    engines: Sequence[Flag] = [flag for owner in ("megatron", "sglang", "router") for flag in engine_flags(owner)]
    return FlagTable([*own_flags(known), *engines])


@cache
def secret_settings(known: Components | None = None) -> frozenset[tuple[str, str]]:
    """Returns (owner, dest) of all settings that are masked in records."""
    return frozenset((f.owner, f.dest) for f in flag_table(known).flags if f.secret)


def registered_names(flag: Flag) -> tuple[str, ...]:
    """Returns the registered names that a flag accepts; empty if the flag does not select registry entries."""
    known = components()
    if flag.owner != "slime" or flag.dest not in known.own or not declared(known.own[flag.dest]).chosen_from:
        return ()
    return next(chooser.registry.names() for chooser in known.choosers if chooser.setting == flag.dest)
