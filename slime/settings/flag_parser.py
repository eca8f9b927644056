"""`FlagTable`: a strict parser for command lines.

Invariants
1. Flags cannot be abbreviated. The error for an unknown flag suggests a similar one.
2. A setting that is set twice, even with different spellings, must get the same value both times. Flags after
   `--override` replace earlier flags and the file of an earlier `--custom-config-path`, so a script can end with
   `--override "$@"`. Megatron's flags for the model are different: public launch scripts put the flags of the model's
   file first and replace some of them later, so the last one counts, and `replaced` lists the others.
"""

from __future__ import annotations

import shlex
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from slime.core.errors import ConfigError
from slime.core.text import nearest, shorten
from slime.settings.flags import Flag, convert, refuse

OVERRIDE = "--override"
"""The argument after which flags replace earlier flags."""


class FlagTable:
    def __init__(self, flags: Iterable[Flag]) -> None:
        self.flags: tuple[Flag, ...] = tuple(flags)
        self.by_name: dict[str, tuple[Flag, bool]] = {}
        """Spelling -> (flag, whether this spelling switches it on). The first flag wins a shared spelling."""
        for flag in self.flags:
            if flag.internal:
                continue
            for name in flag.names:
                self.by_name.setdefault(name, (flag, True))
            for name in flag.off_names:
                self.by_name.setdefault(name, (flag, False))

    def nearest(self, name: str) -> str | None:
        """Returns the known spelling closest to `name`; None if no spelling is similar."""
        return nearest(name, self.by_name)

    def unknown(self, name: str, elsewhere: Mapping[str, str]) -> str:
        """Returns the message about an unknown flag. `elsewhere` maps other programs' flags to advice."""
        words = set(name[2:].split("-"))
        longer = [known for known, (_, on) in self.by_name.items() if on and words <= set(known[2:].split("-"))][:3]
        if name[2:] in elsewhere:
            do = elsewhere[name[2:]]
        elif near := self.nearest(name):
            do = f"did you mean {near}?"
        elif longer:
            do = f"did you mean {' or '.join(longer)}?"
        else:
            do = "see --help, or search with --help WORD"
        return f"unknown flag {name}; {do}"

    def parse(
        self,
        argv: Sequence[str],
        *,
        owned: Mapping[str, str] = types.MappingProxyType({}),
        elsewhere: Mapping[str, str] = types.MappingProxyType({}),
        replaced: dict[tuple[str, str], str] | None = None,
    ) -> dict[tuple[str, str], Any]:
        """Returns the values on a command line, by (owner, dest).

        `owned` and `elsewhere` map flags to advice: those that slime sets itself, and those of other programs.
        `replaced` records what happened to model flags that were set twice; without it, setting one twice is an error.
        Raises one `ConfigError` that lists all mistakes.
        """
        out: dict[tuple[str, str], Any] = {}
        problems: list[str] = []
        for part in _parts(argv):
            out |= self._parse_part(part, owned, elsewhere, problems, replaced)
        refuse(problems)
        return out

    def _parse_part(
        self,
        argv: Sequence[str],
        owned: Mapping[str, str],
        elsewhere: Mapping[str, str],
        problems: list[str],
        replaced: dict[tuple[str, str], str] | None,
    ) -> dict[tuple[str, str], Any]:
        """Parses the arguments between two `OVERRIDE`s. Appends error messages to `problems`."""
        out: dict[tuple[str, str], Any] = {}
        spelled: dict[tuple[str, str], str] = {}
        position = 0
        while position < len(argv):
            word = argv[position]
            position += 1
            if not word.startswith("--"):
                strays = [word, *self._values(argv, position)]
                position += len(strays) - 1
                problems += _about_strays(strays, elsewhere)
                continue
            name, has_value, inline = word.partition("=")
            name = "--" + name[2:].replace("_", "-")
            words = [inline] if has_value else self._values(argv, position)
            if name in self.by_name and name not in owned:
                flag, on = self.by_name[name]
                position += 0 if has_value else self._num_taken(flag, words)
                if flag.kind == "bool" and not has_value and words and words[0].lower() in (*_YES, *_NO):
                    problems.append(_about_switch(flag, name, words[0], on=on))
                    position += 1
                    continue
                try:
                    value = self._value(flag, name, words, on=on, inline=bool(has_value))
                    taken = words[: self._num_taken(flag, words)]
                    _keep(out, spelled, flag, shlex.join([name, *taken]), value, replaced)
                except ConfigError as error:
                    problems.append(str(error))
                continue
            position += 0 if has_value else len(words)  # skips the values of the unknown flag
            if name in owned:
                problems.append(f"slime sets {name} itself; {owned[name]}")
            else:
                problems.append(self.unknown(name, elsewhere))
        return out

    def _values(self, argv: Sequence[str], position: int) -> list[str]:
        """Returns the arguments from `position` up to the next flag."""
        end = position
        while end < len(argv) and not (argv[end].startswith("--") and len(argv[end]) > 2):
            end += 1
        return list(argv[position:end])

    @staticmethod
    def _num_taken(flag: Flag, words: Sequence[str]) -> int:
        if flag.kind == "bool":
            return 0
        return len(words) if flag.is_list else min(1, len(words))

    @staticmethod
    def _value(flag: Flag, name: str, words: Sequence[str], *, on: bool, inline: bool) -> Any:
        if flag.kind == "bool":
            if inline:
                raise ConfigError(_about_switch(flag, name, words[0], on=on))
            return on
        words = words if flag.is_list else words[:1]
        if flag.may_be_empty and words in ([], [""]):
            return None
        if not words and flag.nargs not in ("*", "?"):
            raise ConfigError(f"{name} has no value; write {name} <{flag.kind}>")
        if (flag.nargs or "").isdigit() and len(words) != int(flag.nargs or 0):
            raise ConfigError(f"{name} has {len(words)} values, but takes {flag.nargs}")
        if flag.optional and flag.is_list and [w.lower() for w in words] == ["none"]:
            return None
        values: Any = tuple(convert(flag, w, where=name) for w in words)
        if flag.is_list:
            return values
        return values[0] if values else True


def _parts(argv: Sequence[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in argv:
        if word == OVERRIDE:
            yield part
            part = []
        else:
            part.append(word)
    yield part


def _keep(
    out: dict[tuple[str, str], Any],
    spelled: dict[tuple[str, str], str],
    flag: Flag,
    said: str,
    value: Any,
    replaced: dict[tuple[str, str], str] | None,
) -> None:
    """Stores the value of one occurrence of a flag. `said` is the text that the user wrote.

    Raises `ConfigError` if an earlier occurrence has a different value that must not be replaced.
    """
    key = (flag.owner, flag.dest)
    if flag.append:
        out[key] = (*out.get(key, ()), value)
        return
    earlier = spelled.setdefault(key, said)
    if out.setdefault(key, value) == value:
        return
    if replaced is not None and flag.of_model:
        replaced[key] = f"{shorten(earlier, 200)}, which a later {shorten(said, 200)} replaces"
        out[key], spelled[key] = value, said
        return
    two = f"{flag.names[0]} has two values"
    if not flag.secret:
        two = f"{shorten(earlier, 200)} and {shorten(said, 200)} contradict each other"
    raise ConfigError(f"{two}; keep one, or write {OVERRIDE} before the flags that take precedence")


_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
"""Values that switch a flag on or off in other programs."""


def _about_switch(flag: Flag, name: str, word: str, *, on: bool) -> str:
    """Returns the message about a value that follows a switch."""
    said = f"{name} is a switch and takes no value, but is followed by {word!r}"
    other = next(iter(flag.off_names if on else flag.names), None)
    if word.lower() in _NO and other is not None:
        return f"{said}; write {other} to switch it {'off' if on else 'on'}"
    return f"{said}; leave it out" if word.lower() in _NO else f"{said}; write {name} alone"


def _about_strays(words: Sequence[str], elsewhere: Mapping[str, str]) -> Iterator[str]:
    """Yields messages about arguments that belong to no flag. Other programs write settings as `group.name=value`."""
    answered = {
        w: elsewhere[name] for w in words if "=" in w and (name := w.partition("=")[0].lstrip("+-")) in elsewhere
    }
    for word, answer in answered.items():
        yield f"{word!r} is not a flag; write settings as --name value: {answer}"
    others = " ".join(word for word in words if word not in answered)
    if others:
        yield f"{others!r} does not belong to a flag; write each setting as --name value"
