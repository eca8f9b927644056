"""What formats of calls share: finding them in a text, reading JSON that is followed by something, typing of values.

Invariants
1. Nothing here raises on any text.
2. Arguments that are read can be written as JSON in UTF-8: no NaN, no infinity, no half of a surrogate pair.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime.agent.messages import canonical_arguments
from slime.agent.parsers import Calls

Found = tuple[list[tuple[str, str]], int]
"""Calls, and where in the text they end."""
UNREADABLE = (ValueError, RecursionError)
_KINDS = {"null", "boolean", "integer", "number", "string", "array", "object"}
_SPACE = re.compile(r"\s*")


def scan(
    text: str,
    head: re.Pattern[str],
    call: Callable[[re.Match[str]], Found | None],
    *,
    frames: Sequence[str] = (),
    end: str = "",
) -> Calls:
    """Reads the calls behind each match of `head`.

    `call`: None if it cannot read what begins there; no calls and a place, if the next is looked for from there on.
    `frames`: marks around all calls, left out of the text. `end`: stands behind every call; where none follows, nothing
    more is looked for.
    """
    found: list[tuple[str, str]] = []
    rest: list[str] = []
    at, look, last = 0, 0, text.rfind(end)
    ill_formed = False
    while match := head.search(text, look):
        got = call(match) if match.end() <= last or not end else None
        if got is None or not got[0]:
            ill_formed, look = True, max(match.end(), match.start() + 1, got[1] if got else 0)
            if look > last and end:
                break
            continue
        rest.append(text[at : match.start()])
        found += got[0]
        at = look = got[1]
    rest.append(text[at:])
    left = "".join(rest)
    ill_formed = ill_formed or not found
    if ill_formed:
        return Calls(tuple(found), left, True)
    for frame in frames:
        left = left.replace(frame, "")
    return Calls(tuple(found), left.strip())


def json_at(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON value that begins there, and where it ends."""
    got = json_or_break(text, at)
    return None if isinstance(got, int) else got


def json_or_break(text: str, at: int) -> tuple[Any, int] | int:
    """As `json_at`; of what cannot be read where it breaks, which is the end of the text if it nests too deep."""
    try:
        value, end = _SCAN(text, _skip(text, at))
    except StopIteration:  # nothing begins there
        return at
    except RecursionError:
        return len(text)
    except json.JSONDecodeError as error:
        return error.pos
    except ValueError:  # a number that JSON does not have: nobody says where
        return at
    return value, end


def followed(text: str, at: int, by: str) -> int | None:
    """Where `by` ends, if it stands there behind white space."""
    at = _skip(text, at)
    return at + len(by) if text.startswith(by, at) else None


def named_call(name: Any, arguments: Any) -> tuple[str, str] | None:
    """A call, if that is a name and those are arguments."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        json.dumps([name, arguments], allow_nan=False, ensure_ascii=False).encode()
        return name, canonical_arguments(arguments)
    except UNREADABLE:
        return None


def call_of(value: Any) -> tuple[str, str] | None:
    """A call as most formats write it in JSON; `parameters` is another word for `arguments`."""
    if not isinstance(value, dict):
        return None
    return named_call(value.get("name"), value.get("arguments", value.get("parameters", {})))


def functions(tools: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
    """Name -> the JSON schema of its parameters."""
    out: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schema = function.get("parameters")
            out[function["name"]] = schema if isinstance(schema, Mapping) else {}
    return out


def typed_arguments(name: str, values: Mapping[str, str], tools: Sequence[Any]) -> tuple[str, str] | None:
    """A call whose values came as text: each gets the type that the schema of its parameter names."""
    properties = functions(tools).get(name, {}).get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return named_call(name, {key: _typed(text, known.get(key)) for key, text in values.items()})


def _typed(text: str, schema: Any) -> Any:
    """JSON of a kind that the schema allows; else text. Where a schema says nothing: JSON if it is some."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    word = text.strip()
    if "boolean" in kinds and word.lower() in ("true", "false"):  # Python's spelling is in some templates
        return word.lower() == "true"
    if "null" in kinds and word == "None":
        return None
    got = json_at(word, 0)
    if got is None or got[1] != len(word):
        return text
    value = got[0]
    if isinstance(value, float) and "number" not in kinds and "integer" in kinds and value.is_integer():
        value = int(value)
    return value if not kinds or _kind(value) & kinds else text


def _kinds(schema: Any, depth: int = 8) -> set[str]:
    """JSON types that a schema allows; empty: it does not say."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    said = schema.get("type")
    if isinstance(said, str | list):
        named = [said] if isinstance(said, str) else said
        return {kind for kind in named if isinstance(kind, str)} & _KINDS
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if values:
        return {kind for value in values for kind in _kind(value)}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            parts = [_kinds(part, depth - 1) for part in schema[key]]
            return set() if key != "allOf" and not all(parts) else {kind for part in parts for kind in part}
    return {"object"} if "properties" in schema else {"array"} if "items" in schema else set()


def _kind(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} cannot be written in JSON")


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "it matches nothing too"
    return found.end()


_SCAN: Callable[[str, int], tuple[Any, int]]
_SCAN = json.JSONDecoder(parse_constant=_refuse).scan_once  # type: ignore[attr-defined]  # the stubs leave it out
