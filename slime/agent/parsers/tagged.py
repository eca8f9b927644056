"""Formats whose arguments are text between tags, and take their type from the tool's schema.

    qwen3_coder    <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>
    glm45          <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>

A value ends at the closing tag that the next tag of the format follows, so it may hold tags itself, and pairs may be
reached from several heads. Each pair is looked for once, whatever a text is: see `_Pairs`.
Source: the chat templates of Qwen3-Coder and GLM-4.5 (with line feeds between tags) and GLM-4.7 (without).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from slime.agent.parsers import FORMATS, Calls, ToolFormat
from slime.agent.parsers.scan import Found, followed, scan, typed_arguments

_QWEN_HEAD = re.compile(r"(?:(<tool_call>)\s*)?<function=([^<>\n]*)>|<tool_call>|<function=")
_QWEN_KEY = re.compile(r"\s*<parameter=([^<>\n]+)>")
_QWEN_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_GLM_HEAD = re.compile(r"<tool_call>\s*([^<>\s]*)")
_GLM_KEY = re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>")
_GLM_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))")


@FORMATS.register("qwen3_coder")
class Qwen3Coder(ToolFormat):
    """Parameters in tags that name them. The model may leave `<tool_call>` out."""

    marks = ("<tool_call>", "<function=")
    signs = ("<tool_call>", "<function=", "<parameter=")

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        pairs = _Pairs(text, _QWEN_KEY, _QWEN_END)
        return scan(text, _QWEN_HEAD, lambda head: _qwen(head, pairs, tools), end="</function>")


@FORMATS.register("glm45", "glm47")
class Glm45(ToolFormat):
    """Keys and values in tags."""

    marks = ("<tool_call>",)
    signs = ("<tool_call>", "<arg_key>")

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        pairs = _Pairs(text, _GLM_KEY, _GLM_END)
        return scan(text, _GLM_HEAD, lambda head: _glm(head, pairs, tools), end="</tool_call>")


class _Pairs:
    """The keys and values of a text. Invariant: what a place leads to is found once, from however many heads."""

    def __init__(self, text: str, key: re.Pattern[str], end: re.Pattern[str]) -> None:
        """`key`: all of a pair before its value; `end`: behind it, without what follows."""
        self._text, self._key = text, key
        self._ends = [match.span() for match in end.finditer(text)]
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

    def values(self, at: int) -> dict[str, str]:
        """Key -> value of the pairs that begin there."""
        out: dict[str, str] = {}
        while (pair := self._pair(at)) is not None:
            key, at, (start, end) = pair
            out[key] = self._text[start:end]
        return out

    def _pair(self, at: int) -> tuple[str, int, tuple[int, int]] | None:
        """(key, where the pair ends, where its value stands)."""
        head = self._key.match(self._text, at)
        if head is None:
            return None
        number = bisect_left(self._ends, (head.end(), 0))
        if number == len(self._ends):
            return None
        start, end = self._ends[number]
        return head[1], end, (head.end(), start)


def _qwen(head: re.Match[str], pairs: _Pairs, tools: Sequence[Any]) -> Found | None:
    last = pairs.end(head.end())
    end = followed(head.string, last, "</function>")
    closed = None if end is None else followed(head.string, end, "</tool_call>")
    if end is None or not (head[2] or "").strip() or (head[1] and closed is None) or last in pairs.unreadable:
        return None
    values = {key: text.removeprefix("\n").removesuffix("\n") for key, text in pairs.values(head.end()).items()}
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
    values = {key.strip(): text for key, text in pairs.values(head.end()).items()}
    call = typed_arguments(head[1], values, tools)
    if call is None:
        pairs.unreadable.add(last)
        return None
    return [call], end
