"""The harmony format of gpt-oss: a turn consists of messages, whose headers name a channel and a recipient.

    <|channel|>analysis<|message|>THINKING<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The chat template writes the recipient before the channel. A call ends the turn, so a turn has at most one call.
Source: OpenAI's guide to the harmony format, and the chat template of gpt-oss.

Invariant: a header becomes text only if it is invalid or its call cannot be parsed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import Any

from slime.agent.parsers import FORMATS, AnswerReader, Calls, Parsed, ToolFormat, begins
from slime.agent.parsers.tagged import json_at, named_call

_START, _CHANNEL, _MESSAGE, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
_MARKS = re.compile(r"<\|(?:start|channel|constrain|message|end|return|call)\|>")
_ALL = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_CHANNEL_OF = re.compile(r"<\|channel\|>\s*([a-z]+)")
_TO = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_HEADS = (_START, _CHANNEL, _MESSAGE, "to=")
"""Strings that can begin a message."""


class _Kind(Enum):
    HEAD = "head"
    """The header is not complete yet."""
    THINKING = "thinking"
    TEXT = "text"
    CALL = "call"


@FORMATS.register("gpt-oss")
class GptOss(ToolFormat):
    """Harmony messages with channels."""

    marks = (f"{_CHANNEL}commentary to=",)
    signs = (_CHANNEL, _CALL)
    thought = re.compile(r"<\|channel\|>analysis<\|message\|>[^<]*(?:<(?!\|end\|>)[^<]*)*<\|end\|><\|start\|>assistant")

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        got = self.reader(tools).all(text)
        return Calls(got.calls, got.text, got.ill_formed)

    def reader(self, tools: Sequence[Any] = (), prompt_end: str = "") -> AnswerReader:
        """Ignores `prompt_end`, because the prompt always ends at the beginning of a header."""
        return _Harmony(bool(tools))


class _Harmony(AnswerReader):
    ends = frozenset(("<|end|>", "<|return|>", _CALL))

    def __init__(self, calls: bool) -> None:
        """`calls`: whether there are tools to call."""
        self._may_call = calls
        self._kind = _Kind.HEAD
        self._raw: list[str] = []
        """The raw text of the current header or call. It becomes text if it is invalid."""
        self._begun = ""
        """The first characters of the header, enough to recognize it."""
        self._body: list[str] = []
        """The body of a call."""
        self._pending = ""
        """Trailing text that may be the beginning of a marker."""
        self._said: dict[str, list[str]] = {"thinking": [], "text": []}
        self._found: list[tuple[str, str]] = []
        self._ill_formed = False

    def feed(self, text: str) -> list[tuple[str, str]]:
        return self._read(self._pending + text, last=False)

    def end(self) -> tuple[list[tuple[str, str]], Parsed]:
        parts = [*self._read(self._pending, last=True), *self._broken()]
        text, thoughts = ("".join(self._said[kind]) for kind in ("text", "thinking"))
        return parts, Parsed(text, thoughts or None, tuple(self._found), self._ill_formed)

    def _read(self, text: str, *, last: bool) -> list[tuple[str, str]]:
        parts: list[tuple[str, str]] = []
        at = 0
        for mark in _MARKS.finditer(text):
            parts += [*self._plain(text[at : mark.start()]), *self._mark(mark[0])]
            at = mark.end()
        end = len(text) - (0 if last else begins(text[at:], _ALL))
        parts += self._plain(text[at:end])
        self._pending = text[end:]
        return parts

    def _plain(self, text: str) -> list[tuple[str, str]]:
        """Processes text that contains no marker. Returns the parts that can no longer change."""
        match self._kind:
            case _ if not text:
                return []
            case _Kind.HEAD:
                self._head(text)
                is_head = any(self._begun.startswith(head) or head.startswith(self._begun) for head in _HEADS)
                return [] if is_head else self._broken()
            case _Kind.CALL:
                self._raw.append(text)
                self._body.append(text)
                return []
            case kind:
                return self._say(kind.value, text)

    def _head(self, text: str) -> None:
        self._raw.append(text)
        self._begun = (self._begun + text).lstrip()[: len(_CHANNEL)]

    def _mark(self, mark: str) -> list[tuple[str, str]]:
        if self._kind is _Kind.HEAD and mark not in self.ends:
            self._head(mark)
            return self._opened("".join(self._raw)) if mark == _MESSAGE else []
        if mark not in self.ends and mark not in (_START, _CHANNEL):
            return self._plain(mark)
        parts = self._closed(mark) if self._kind is _Kind.CALL else self._broken()
        self._kind, self._begun = _Kind.HEAD, ""
        if mark not in self.ends:  # the previous message has no end marker
            self._head(mark)
        return parts

    def _opened(self, header: str) -> list[tuple[str, str]]:
        channel, to = _CHANNEL_OF.search(header), _TO.search(header)
        if to is not None and self._may_call:
            self._kind, self._body = _Kind.CALL, []
            return []
        if to is not None:
            return self._broken()
        self._kind = _Kind.THINKING if channel is not None and channel[1] == "analysis" else _Kind.TEXT
        self._raw.clear()
        return []

    def _closed(self, mark: str) -> list[tuple[str, str]]:
        if mark in self.ends:
            self._raw.append(mark)
        to = _TO.search("".join(self._raw[: self._raw.index(_MESSAGE)]))
        assert to is not None, "a call must have a recipient"
        text = "".join(self._body).strip() or "{}"
        got = json_at(text, 0)
        whole = got is not None and got[1] == len(text)
        call = named_call(to[1].rpartition(".")[2], got[0]) if got is not None and whole and mark == _CALL else None
        if call is None:
            return self._broken()
        self._found.append(call)
        self._raw.clear()
        return []

    def _broken(self) -> list[tuple[str, str]]:
        """Turns the buffered header or call into text, and treats whatever follows as text."""
        held, tried = "".join(self._raw), self._kind is _Kind.CALL
        self._raw = []
        self._ill_formed = self._ill_formed or (self._may_call and (tried or _TO.search(held) is not None))
        self._kind = _Kind.TEXT
        return self._say("text", held) if held.strip() else []

    def _say(self, kind: str, text: str) -> list[tuple[str, str]]:
        self._said[kind].append(text)
        return [(kind, text)]
