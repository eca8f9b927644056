"""Formats that write arguments as text between tags. The tool's schema determines the argument types.

    qwen3_coder    <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>
    glm45          <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>
    minimax-m2     <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>...
    deepseekv32    like minimax-m2 with other markers; each parameter says whether it is text or JSON

A value ends at a closing tag that is followed by another tag of the format, so values may contain tags. If a value
contains the end of a call and the beginning of the next one, a closing tag is missing, and parsing continues at the
next call. `_Pairs` searches for each key and value only once, even if several heads lead to the same pair.

Source: the chat templates of Qwen3-Coder, GLM-4.5 (with newlines between tags), GLM-4.7 (without) and MiniMax-M2; the
encoding of DeepSeek-V3.2, which has no template.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from slime.agent.messages import canonical_arguments
from slime.agent.parsers import FORMATS, Calls, ToolFormat

# Functions shared by all call formats. They never raise, whatever the text. Parsed arguments can be serialized as UTF-8
# JSON: they contain no NaN, no infinity and no lone surrogate.

Found = tuple[list[tuple[str, str]], int]
"""(calls, position in the text at which they end)."""
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
    """Parses the calls at each match of `head`.

    `call`: parses the calls at a match. None means that there is no call; an empty list with a position means that the
    search continues at that position. `frames`: markers around the calls, removed from the text. `end`: the string that
    follows every call; the search stops after its last occurrence.
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
    """Returns (JSON value at position `at`, its end); None if it cannot be parsed."""
    got = json_or_break(text, at)
    return None if isinstance(got, int) else got


def json_or_break(text: str, at: int) -> tuple[Any, int] | int:
    """Like `json_at`, but returns the position of an error (the end of the text if the JSON is nested too deeply)."""
    try:
        value, end = _SCAN(text, _skip(text, at))
    except StopIteration:  # no value begins there
        return at
    except RecursionError:
        return len(text)
    except json.JSONDecodeError as error:
        return error.pos
    except ValueError:  # NaN or Infinity, at an unknown position
        return at
    return value, end


def followed(text: str, at: int, by: str) -> int | None:
    """If `by` follows position `at`, after optional whitespace, returns the end of `by`; else None."""
    at = _skip(text, at)
    return at + len(by) if text.startswith(by, at) else None


def named_call(name: Any, arguments: Any) -> tuple[str, str] | None:
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        json.dumps([name, arguments], allow_nan=False, ensure_ascii=False).encode()
        return name, canonical_arguments(arguments)
    except UNREADABLE:
        return None


def call_of(value: Any) -> tuple[str, str] | None:
    """Returns the call in a JSON object with `name` and `arguments` (or `parameters`); None if it is not a call."""
    if not isinstance(value, dict):
        return None
    return named_call(value.get("name"), value.get("arguments", value.get("parameters", {})))


def functions(tools: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
    """Returns function name -> JSON schema of its parameters."""
    out: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schema = function.get("parameters")
            out[function["name"]] = schema if isinstance(schema, Mapping) else {}
    return out


def typed_arguments(name: str, values: Mapping[str, str], tools: Sequence[Any]) -> tuple[str, str] | None:
    """Builds a call from text values, each converted to the type in its parameter's schema; None if that fails."""
    properties = functions(tools).get(name, {}).get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return named_call(name, {key: _typed(text, known.get(key)) for key, text in values.items()})


def _typed(text: str, schema: Any) -> Any:
    """Parses the text as JSON if it is valid and of a type that the schema allows; else returns the text itself."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    word = text.strip()
    if "boolean" in kinds and word.lower() in ("true", "false"):  # some templates use Python's spelling
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
    """Returns the JSON types that a schema allows; empty if it specifies none."""
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
    raise ValueError(f"{constant} is not valid JSON")


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "the pattern must match the empty string"
    return found.end()


_SCAN: Callable[[str, int], tuple[Any, int]]
_SCAN = json.JSONDecoder(parse_constant=_refuse).scan_once  # type: ignore[attr-defined]  # missing in the stubs

_QWEN_HEAD = re.compile(r"(?:(<tool_call>)\s*)?<function=([^<>\n]*)>|<tool_call>|<function=")
_QWEN_KEY = re.compile(r"\s*<parameter=([^<>\n]+)>")
_QWEN_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_QWEN_NEXT = re.compile(r"</function>\s*(?:</tool_call>\s*)?(?:<tool_call>\s*)?<function=")
_GLM_HEAD = re.compile(r"<tool_call>\s*([^<>\s]*)")
_GLM_KEY = re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>")
_GLM_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))")
_GLM_NEXT = re.compile(r"</tool_call>\s*<tool_call>")
_MINIMAX_HEAD = re.compile(r"<invoke name=\"([^\"<>]*)\">|<invoke name=|<minimax:tool_call>(?!\s*<invoke name=)")
_MINIMAX_KEY = re.compile(r"\s*<parameter name=\"([^\"<>]+)\">")
_MINIMAX_END = re.compile(r"</parameter>(?=\s*(?:<parameter name=|</invoke>))")
_MINIMAX_NEXT = re.compile(r"</invoke>\s*<invoke name=")
_DSML = "\uff5cDSML\uff5c"
_DSML_HEAD = re.compile(
    rf"<{_DSML}invoke\s+name=\"([^\"<>]*)\"\s*(/?)>|<{_DSML}invoke|<{_DSML}function_calls>(?!\s*<{_DSML}invoke)"
)
_DSML_KEY = re.compile(rf"\s*<{_DSML}parameter\s+name=\"([^\"<>]+)\"\s+string=\"([^\"<>]+)\"\s*>")
_DSML_END = re.compile(rf"</{_DSML}parameter>(?=\s*(?:<{_DSML}parameter|</{_DSML}invoke>))")
_DSML_NEXT = re.compile(rf"</{_DSML}invoke>\s*<{_DSML}invoke")


@FORMATS.register("qwen3_coder")
class Qwen3Coder(ToolFormat):
    """Parameters in named tags. Models sometimes omit `<tool_call>`."""

    marks = ("<tool_call>", "<function=")
    signs = ("<tool_call>", "<function=", "<parameter=")
    breaks = ("<tool_call>",)

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        pairs = _Pairs(text, _QWEN_KEY, _QWEN_END, _QWEN_NEXT)
        return scan(text, _QWEN_HEAD, lambda head: _qwen(head, pairs, tools), end="</function>")


@FORMATS.register("glm45", "glm47")
class Glm45(ToolFormat):
    marks = breaks = ("<tool_call>",)
    signs = ("<tool_call>", "<arg_key>")

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        pairs = _Pairs(text, _GLM_KEY, _GLM_END, _GLM_NEXT)
        return scan(text, _GLM_HEAD, lambda head: _closed_by("</tool_call>", head, pairs, tools), end="</tool_call>")


@FORMATS.register("minimax-m2")
class MiniMaxM2(ToolFormat):
    marks = ("<minimax:tool_call>",)
    signs = marks

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        pairs = _Pairs(text, _MINIMAX_KEY, _MINIMAX_END, _MINIMAX_NEXT)
        frames = (*self.marks, "</minimax:tool_call>")
        read = partial(_closed_by, "</invoke>", pairs=pairs, tools=tools)
        return scan(text, _MINIMAX_HEAD, read, frames=frames, end="</invoke>")


@FORMATS.register("deepseekv32")
class DeepSeekV32(ToolFormat):
    """Parameters in tags that mark them as text or JSON, or all parameters in one JSON object."""

    marks = (f"<{_DSML}function_calls>",)
    signs = (_DSML, "function_calls")

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        pairs = _Pairs(text, _DSML_KEY, _DSML_END, _DSML_NEXT)
        frames = (*self.marks, f"</{_DSML}function_calls>")
        return scan(text, _DSML_HEAD, lambda head: _dsml(head, pairs), frames=frames)


class _Pairs:
    """Key-value pairs in a text. Invariant: each position is parsed only once, even if several heads lead to it."""

    def __init__(self, text: str, key: re.Pattern[str], end: re.Pattern[str], following: re.Pattern[str]) -> None:
        """`key`: matches a pair up to its value. `end`: matches the tag after the value. `following`: matches the end
        of a call and the beginning of the next.
        """
        self._text, self._key = text, key
        self._ends = [match.span() for match in end.finditer(text)]
        self._nexts = [match.start() for match in following.finditer(text)]
        self._leads: dict[int, int] = {}
        """Start of a run of pairs -> its end."""
        self.unreadable: set[int] = set()
        """Ends of the runs of pairs that contain an unparsable value."""

    def end(self, at: int) -> int:
        """Returns the end of the run of pairs that begins at `at`; `at` itself if there is none."""
        passed: list[int] = []
        while at not in self._leads and (pair := self._pair(at)) is not None:
            passed.append(at)
            at = pair[1]
        at = self._leads.get(at, at)
        self._leads.update(dict.fromkeys([*passed, at], at))
        return at

    def values(self, at: int) -> Iterator[tuple[re.Match[str], str]]:
        """Yields (match of `key`, value) for each pair in the run that begins at `at`."""
        while (pair := self._pair(at)) is not None:
            head, at, start = pair
            yield head, self._text[head.end() : start]

    def _pair(self, at: int) -> tuple[re.Match[str], int, int] | None:
        """Returns (match of `key`, end of the pair, end of its value); None if there is no pair at `at`."""
        head = self._key.match(self._text, at)
        if head is None:
            return None
        number = bisect_left(self._ends, (head.end(), 0))
        if number == len(self._ends):
            return None
        start, end = self._ends[number]
        following = bisect_left(self._nexts, head.end())
        if following < len(self._nexts) and self._nexts[following] < start:
            return None
        return head, end, start

    def found(self, call: tuple[str, str] | None, last: int, end: int) -> Found | None:
        """Returns the call and its end. If `call` is None, marks the pairs up to `last` as unparsable."""
        if call is None:
            self.unreadable.add(last)
            return None
        return [call], end


def _qwen(head: re.Match[str], pairs: _Pairs, tools: Sequence[Any]) -> Found | None:
    last = pairs.end(head.end())
    end = followed(head.string, last, "</function>")
    closed = None if end is None else followed(head.string, end, "</tool_call>")
    if end is None or not (head[2] or "").strip() or (head[1] and closed is None) or last in pairs.unreadable:
        return None
    values = {key[1]: text.removeprefix("\n").removesuffix("\n") for key, text in pairs.values(head.end())}
    return pairs.found(typed_arguments(head[2].strip(), values, tools), last, end if closed is None else closed)


def _closed_by(close: str, head: re.Match[str], pairs: _Pairs, tools: Sequence[Any]) -> Found | None:
    last = pairs.end(head.end())
    end = followed(head.string, last, close)
    if end is None or not head[1] or last in pairs.unreadable:
        return None
    values = {key[1].strip(): text for key, text in pairs.values(head.end())}
    return pairs.found(typed_arguments(head[1], values, tools), last, end)


def _dsml(head: re.Match[str], pairs: _Pairs) -> Found | None:
    if not head[1]:
        return None
    if head[2]:
        return [(head[1], "{}")], head.end()
    last, values = pairs.end(head.end()), None
    if last == head.end() and (whole := json_at(head.string, last)) is not None:
        values, last = whole
    end = followed(head.string, last, f"</{_DSML}invoke>")
    if end is None or last in pairs.unreadable:
        return None
    if values is None:
        values = {key[1]: text if key[2] == "true" else _json_or_text(text) for key, text in pairs.values(head.end())}
    return pairs.found(named_call(head[1], values), last, end)


def _json_or_text(text: str) -> Any:
    word = text.strip()
    got = json_at(word, 0)
    return text if got is None or got[1] != len(word) else got[0]
