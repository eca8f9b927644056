"""Formats whose arguments are text between tags, and take their type from the tool's schema.

    qwen3_coder    <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>
    glm45          <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>
    minimax-m2     <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>...
    deepseekv32    as minimax-m2 with marks of its own; each parameter says whether it is text or JSON

A value ends at the closing tag that the next tag of the format follows, so it may hold tags itself, but not the end of
a call and the beginning of the next: there a tag is missing, and the next call is read. Pairs may be reached from
several heads. Each pair is looked for once, whatever a text is: see `_Pairs`.
Source: the chat templates of Qwen3-Coder, GLM-4.5 (with line feeds between tags), GLM-4.7 (without) and MiniMax-M2;
the encoding of DeepSeek-V3.2, which has no template.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from slime.agent.parsers import FORMATS, Calls, ToolFormat
from slime.agent.parsers.scan import Found, followed, json_at, named_call, scan, typed_arguments

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
    """Parameters in tags that name them. The model may leave `<tool_call>` out."""

    marks = ("<tool_call>", "<function=")
    signs = ("<tool_call>", "<function=", "<parameter=")
    breaks = ("<tool_call>",)

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        pairs = _Pairs(text, _QWEN_KEY, _QWEN_END, _QWEN_NEXT)
        return scan(text, _QWEN_HEAD, lambda head: _qwen(head, pairs, tools), end="</function>")


@FORMATS.register("glm45", "glm47")
class Glm45(ToolFormat):
    """Keys and values in tags."""

    marks = breaks = ("<tool_call>",)
    signs = ("<tool_call>", "<arg_key>")

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        pairs = _Pairs(text, _GLM_KEY, _GLM_END, _GLM_NEXT)
        return scan(text, _GLM_HEAD, lambda head: _glm(head, pairs, tools), end="</tool_call>")


@FORMATS.register("minimax-m2")
class MiniMaxM2(ToolFormat):
    """Functions and parameters in tags that name them."""

    marks = ("<minimax:tool_call>",)
    signs = marks

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        pairs = _Pairs(text, _MINIMAX_KEY, _MINIMAX_END, _MINIMAX_NEXT)
        frames = (*self.marks, "</minimax:tool_call>")
        return scan(text, _MINIMAX_HEAD, lambda head: _minimax(head, pairs, tools), frames=frames, end="</invoke>")


@FORMATS.register("deepseekv32")
class DeepSeekV32(ToolFormat):
    """Parameters in tags, which say whether they are text, or all of them as one JSON object."""

    marks = (f"<{_DSML}function_calls>",)
    signs = (_DSML, "function_calls")

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        pairs = _Pairs(text, _DSML_KEY, _DSML_END, _DSML_NEXT)
        frames = (*self.marks, f"</{_DSML}function_calls>")
        return scan(text, _DSML_HEAD, lambda head: _dsml(head, pairs), frames=frames)


class _Pairs:
    """The keys and values of a text. Invariant: what a place leads to is found once, from however many heads."""

    def __init__(self, text: str, key: re.Pattern[str], end: re.Pattern[str], following: re.Pattern[str]) -> None:
        """`key`: all of a pair before its value; `end`: behind it, without what follows; `following`: the end of a call
        and the beginning of the next one.
        """
        self._text, self._key = text, key
        self._ends = [match.span() for match in end.finditer(text)]
        self._nexts = [match.start() for match in following.finditer(text)]
        self._leads: dict[int, int] = {}
        """Where the pairs end that begin at a place."""
        self.unreadable: set[int] = set()
        """Ends of pairs whose values cannot be read."""

    def end(self, at: int) -> int:
        """Where the last one ends of the pairs that begin there; the place itself if none does."""
        passed: list[int] = []
        while at not in self._leads and (pair := self._pair(at)) is not None:
            passed.append(at)
            at = pair[1]
        at = self._leads.get(at, at)
        self._leads.update(dict.fromkeys([*passed, at], at))
        return at

    def values(self, at: int) -> Iterator[tuple[re.Match[str], str]]:
        """(match of `key`, value) of the pairs that begin there."""
        while (pair := self._pair(at)) is not None:
            head, at, start = pair
            yield head, self._text[head.end() : start]

    def _pair(self, at: int) -> tuple[re.Match[str], int, int] | None:
        """(match of `key`, where the pair ends, where its value ends)."""
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


def _qwen(head: re.Match[str], pairs: _Pairs, tools: Sequence[Any]) -> Found | None:
    last = pairs.end(head.end())
    end = followed(head.string, last, "</function>")
    closed = None if end is None else followed(head.string, end, "</tool_call>")
    if end is None or not (head[2] or "").strip() or (head[1] and closed is None) or last in pairs.unreadable:
        return None
    values = {key[1]: text.removeprefix("\n").removesuffix("\n") for key, text in pairs.values(head.end())}
    call = typed_arguments(head[2].strip(), values, tools)
    if call is None:
        pairs.unreadable.add(last)
        return None
    return [call], end if closed is None else closed


def _glm(head: re.Match[str], pairs: _Pairs, tools: Sequence[Any]) -> Found | None:
    last = pairs.end(head.end())
    end = followed(head.string, last, "</tool_call>")
    if end is None or not head[1] or last in pairs.unreadable:
        return None
    values = {key[1].strip(): text for key, text in pairs.values(head.end())}
    call = typed_arguments(head[1], values, tools)
    if call is None:
        pairs.unreadable.add(last)
        return None
    return [call], end


def _minimax(head: re.Match[str], pairs: _Pairs, tools: Sequence[Any]) -> Found | None:
    last = pairs.end(head.end())
    end = followed(head.string, last, "</invoke>")
    if end is None or not head[1] or last in pairs.unreadable:
        return None
    call = typed_arguments(head[1], {key[1]: text for key, text in pairs.values(head.end())}, tools)
    if call is None:
        pairs.unreadable.add(last)
        return None
    return [call], end


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
    call = named_call(head[1], values)
    if call is None:
        pairs.unreadable.add(last)
        return None
    return [call], end


def _json_or_text(text: str) -> Any:
    word = text.strip()
    got = json_at(word, 0)
    return text if got is None or got[1] != len(word) else got[0]
