"""One command-line flag, and the strict parser that turns a command line into values.

Invariants
1. A flag is known by its whole name; there are no prefix abbreviations, an unknown one is an error with a suggestion.
2. A value is converted and checked the same way whether it comes from the command line or from YAML.
3. The last occurrence of a flag wins, as in every shell script that ends in "$@".
4. A secret may be given as @FILE, which is read: a command line is for everybody on the host to see.
"""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError
from slime.core.hidden import HIDDEN
from slime.settings.problems import refuse

KINDS = ("int", "float", "str", "bool", "json", "human_int", "dtype", "int_or_json", "float_or_json", "str_or_json")
"""How a value is written. `human_int` is SGLang's `4k`; `dtype` a torch dtype; `*_or_json` also takes a list."""

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "uint8": "uint8",
    "fp8": "uint8",
}
"""Spellings of a dtype; Megatron calls the storage of fp8 moments uint8."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting and how it is spelled."""

    dest: str
    """Field name, unique per owner."""
    owner: str
    """Whose setting it is: slime, megatron, sglang or router."""
    names: tuple[str, ...]
    """Spellings, with dashes; the first is the one shown. For `bool` they switch it on."""
    kind: str
    """One of `KINDS`."""
    default: Any = None
    doc: str = ""
    group: str = ""
    """Heading in --help."""
    off_names: tuple[str, ...] = ()
    """Spellings that switch a `bool` off."""
    nargs: str | None = None
    """None: one value; "+" / "*": a list; "?": zero or one; a digit: a list of that length."""
    append: bool = False
    """Each occurrence adds one entry."""
    choices: tuple[Any, ...] | None = None
    optional: bool = False
    """`none` is a value."""
    required: bool = False
    """The run cannot do without a value."""
    derived: bool = False
    """Without a value from the user it is computed; --explain says why."""
    secret: bool = False
    """Masked wherever it is written; @FILE stands for what is in a file."""
    internal: bool = False
    """Set by the run, not by a flag."""
    configs: tuple[str, ...] = ()
    """Upstream config classes that have this field (Megatron)."""

    @property
    def is_list(self) -> bool:
        return self.nargs in ("+", "*") or (self.nargs or "").isdigit()


FILE_MARK = "@"
"""In front of the name of a file that holds the value."""


def shown(flag: Flag, value: Any) -> str:
    """A value in a message."""
    return HIDDEN if flag.secret else repr(value)


def _number(kind: str, text: str) -> Any:
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text)
    if kind == "human_int":
        if not re.fullmatch(r"-?\d+|\d+(\.\d+)?[kKmMgGtT]", text):
            raise ValueError
        return text if text[-1].isalpha() else int(text)
    if kind == "dtype":
        return DTYPES[text.removeprefix("torch.")]
    raise AssertionError(f"unknown kind {kind!r}")


def _one(flag: Flag, text: str) -> Any:
    """Converts one word; raises ValueError, KeyError or json errors when it cannot."""
    if flag.kind == "str":
        return text
    if flag.kind == "json":
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(f"not an object: {text}")
        return value
    if flag.kind.endswith("_or_json"):
        base = flag.kind.removesuffix("_or_json")
        if text.lstrip().startswith(("[", "(")) or "," in text or "*" in text:
            return _list_or_pattern(text)
        return text if base == "str" else _number(base, text)
    return _number(flag.kind, text)


def _list_or_pattern(text: str) -> Any:
    """A list as JSON, else the text: Megatron writes layer patterns as Python expressions such as ([0]*3+[1])*8."""
    if "*" in text or "+" in text:
        return text
    return json.loads(text) if text.lstrip().startswith("[") and text.rstrip().endswith("]") else text


def convert(flag: Flag, text: str, *, where: str) -> Any:
    """One word of the command line as a value of `flag`. Raises `ConfigError`."""
    if flag.optional and text.lower() == "none":
        return None
    if flag.secret and text.startswith(FILE_MARK):
        text = _read_secret(text.removeprefix(FILE_MARK), where=where)
    try:
        value = _one(flag, text)
    except (ValueError, KeyError):
        expected = {"dtype": f"one of {sorted(set(DTYPES.values()))}", "json": "a JSON object"}.get(
            flag.kind, flag.kind
        )
        raise ConfigError(f"{where}: got {shown(flag, text)}, expected {expected}; correct the value") from None
    check_choice(flag, value, where=where)
    return value


def _read_secret(name: str, *, where: str) -> str:
    try:
        text = Path(name).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: got @{name}, which cannot be read: {error}; name the file of the secret") from None
    if not text:
        raise ConfigError(f"{where}: got @{name}, which is empty; write the secret into it")
    return text


def check_choice(flag: Flag, value: Any, *, where: str) -> None:
    """Raises `ConfigError` if the flag has choices and `value` is none of them."""
    if flag.choices is not None and value not in flag.choices:
        near = difflib.get_close_matches(str(value), [str(c) for c in flag.choices], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{where}: got {shown(flag, value)}, which is not one of {', '.join(map(str, flag.choices))}{hint}"
        )


def coerce(flag: Flag, value: Any, *, where: str) -> Any:
    """A YAML value as a value of `flag`, as strictly as on the command line. Raises `ConfigError`."""
    if value is None:
        if not flag.optional:
            raise ConfigError(f"{where}: got null, but it needs a value of type {flag.kind}")
        return None
    if flag.kind == "bool":
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: got {value!r}, but it is a switch; write true or false")
        return value
    if flag.is_list or flag.append:
        if not isinstance(value, list):
            raise ConfigError(f"{where}: got {shown(flag, value)}, but it is a list; write [a, b]")
        return tuple(_coerce_one(flag, v, where=where) for v in value)
    return _coerce_one(flag, value, where=where)


def _coerce_one(flag: Flag, value: Any, *, where: str) -> Any:
    if flag.kind == "json" and isinstance(value, dict):
        return value
    if flag.kind.endswith("_or_json") and isinstance(value, list):
        return value
    wrong = isinstance(value, (bool, list, dict))
    wrong = wrong or (flag.kind == "str" and not isinstance(value, (str, int, float)))
    if wrong:
        raise ConfigError(f"{where}: got {shown(flag, value)}, expected {flag.kind}; correct the value")
    return convert(flag, str(value), where=where)


class FlagTable:
    """All flags of a program by spelling."""

    def __init__(self, flags: Iterable[Flag]) -> None:
        self.flags: tuple[Flag, ...] = tuple(flags)
        self.by_name: dict[str, tuple[Flag, bool]] = {}
        """Spelling -> (flag, False if this spelling switches it off). Earlier flags keep a contested spelling."""
        for flag in self.flags:
            if flag.internal:
                continue
            for name in flag.names:
                self.by_name.setdefault(name, (flag, True))
            for name in flag.off_names:
                self.by_name.setdefault(name, (flag, False))

    def nearest(self, name: str) -> str | None:
        """The known spelling most like `name`; none if nothing is alike."""
        near = difflib.get_close_matches(name, self.by_name, 1, cutoff=0.75)
        return near[0] if near else None

    def unknown(self, name: str, elsewhere: Mapping[str, str]) -> str:
        """What is said about an unknown flag. `elsewhere`: names of other programs -> what to write here."""
        words = set(name[2:].split("-"))
        longer = [known for known, (_, on) in self.by_name.items() if on and words <= set(known[2:].split("-"))][:3]
        if name[2:] in elsewhere:
            do = elsewhere[name[2:]]
        elif near := self.nearest(name):
            do = f"did you mean {near}?"
        elif longer:
            do = f"did you mean {' or '.join(longer)}?"
        else:
            do = "see --help, --help megatron, --help sglang, --help router."
        return f"got unknown flag {name}; {do}"

    def parse(
        self,
        argv: Sequence[str],
        *,
        owned: Mapping[str, str] = types.MappingProxyType({}),
        elsewhere: Mapping[str, str] = types.MappingProxyType({}),
    ) -> dict[tuple[str, str], Any]:
        """Values given on a command line, by (owner, dest).

        `owned` maps spellings that slime sets itself to what to use instead, `elsewhere` names that other programs
        have for a setting. Raises one `ConfigError` with all that is wrong.
        """
        out: dict[tuple[str, str], Any] = {}
        problems: list[str] = []
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
                try:
                    self._store(out, flag, name, words, on=on, inline=bool(has_value))
                except ConfigError as error:
                    problems.append(str(error))
                continue
            position += 0 if has_value else len(words)  # whatever they are, they belong to this word
            if name in owned:
                problems.append(f"got {name}, which slime sets itself; {owned[name]}")
            else:
                problems.append(self.unknown(name, elsewhere))
        refuse(problems)
        return out

    def _values(self, argv: Sequence[str], position: int) -> list[str]:
        """The words after a flag up to the next flag."""
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
    def _store(
        out: dict[tuple[str, str], Any], flag: Flag, name: str, words: Sequence[str], *, on: bool, inline: bool
    ) -> None:
        key = (flag.owner, flag.dest)
        if flag.kind == "bool":
            if inline:
                raise ConfigError(f"{name}: got a value {words[0]!r}, but it is a switch; write {name} alone")
            out[key] = on
            return
        words = words if flag.is_list else words[:1]
        if not words and flag.nargs not in ("*", "?"):
            raise ConfigError(f"{name}: got no value; write {name} <{flag.kind}>")
        if (flag.nargs or "").isdigit() and len(words) != int(flag.nargs or 0):
            raise ConfigError(f"{name}: got {len(words)} values, it takes {flag.nargs}")
        values: Any = tuple(convert(flag, w, where=name) for w in words)
        if not flag.is_list:
            values = values[0] if values else True
        out[key] = (*out.get(key, ()), values) if flag.append else values


def _about_strays(words: Sequence[str], elsewhere: Mapping[str, str]) -> Iterator[str]:
    """What is said about words that belong to no flag; some programs write a setting as `group.name=value`."""
    answered = {
        w: elsewhere[name] for w in words if "=" in w and (name := w.partition("=")[0].lstrip("+-")) in elsewhere
    }
    for word, answer in answered.items():
        yield f"got {word!r}, where every setting is written --name value; {answer}"
    others = " ".join(word for word in words if word not in answered)
    if others:
        yield f"got {others!r}, which belongs to no flag; every setting is written --name value"
