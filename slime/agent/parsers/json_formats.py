"""Formats with JSON calls: Hermes, Kimi K2, Mistral, Llama 3, DeepSeek and gpt-oss; and one for models without calls.

In the harmony format of gpt-oss, a turn consists of messages, whose headers name a channel and a recipient.

    <|channel|>analysis<|message|>THINKING<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The chat template writes the recipient before the channel. A call ends the turn, so a turn has at most one call.
Source: OpenAI's guide to the harmony format, and the chat template of gpt-oss.

Invariant: a harmony header becomes text only if it is invalid or its call cannot be parsed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from enum import Enum
from typing import Any, ClassVar

from slime.agent.parsers import FORMATS, AnswerReader, Calls, Parsed, ToolFormat, begins
from slime.agent.parsers.tagged import Found, call_of, followed, functions, json_at, json_or_break, named_call, scan

_HERMES_HEAD = re.compile(r"<tool_call>")
_HERMES_END = "</tool_call>"
_KIMI_ALL_BEGIN, _KIMI_ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_BEGIN, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_HEAD = re.compile(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.\-]+):\d+\s*<\|tool_call_argument_begin\|>|<\|tool_call_begin\|>"
)
_MISTRAL_HEAD = re.compile(r"\[TOOL_CALLS\]\s*(?:([^\s\[\]{}]+)(?:\[CALL_ID\][^\[\]{}]*)?\[ARGS\])?")
_LLAMA_TAG = "<|python_tag|>"
_LLAMA_TAGGED = re.compile(r"<\|python_tag\|>|;(?=\s*\{)")
_LLAMA_BARE = re.compile(r'(?=\{"name":)|;(?=\s*\{)')
_DEEPSEEK_ALL_BEGIN, _DEEPSEEK_ALL_END = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
_DEEPSEEK_BEGIN, _DEEPSEEK_SEP, _DEEPSEEK_END = (
    "<\uff5ctool▁call▁begin\uff5c>",
    "<\uff5ctool▁sep\uff5c>",
    "<\uff5ctool▁call▁end\uff5c>",
)
_DEEPSEEK_FENCED = re.compile(rf"{_DEEPSEEK_BEGIN}\s*function\s*{_DEEPSEEK_SEP}([^<\n]*)\n\s*```json|{_DEEPSEEK_BEGIN}")
_DEEPSEEK_BARE = re.compile(rf"{_DEEPSEEK_BEGIN}([^<\n]*){_DEEPSEEK_SEP}|{_DEEPSEEK_BEGIN}")


def _json_call(head: re.Match[str], ends: Sequence[str], name: str | None = None) -> Found | None:
    """Parses the JSON call between `head` and `ends`. `name`: the function, if the JSON contains only arguments."""
    got = json_at(head.string, head.end())
    if got is None:
        return None
    call = call_of(got[0]) if name is None else named_call(name, got[0])
    at: int | None = got[1]
    for mark in ends:
        at = None if at is None else followed(head.string, at, mark)
    return None if call is None or at is None else ([call], at)


@FORMATS.register("hermes", "qwen25")
class Hermes(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeated.

    Source: the chat templates of Qwen2.5 and Qwen3.
    """

    marks = ("<tool_call>",)
    signs = breaks = marks

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return scan(text, _HERMES_HEAD, lambda head: _json_call(head, [_HERMES_END]), end=_HERMES_END)


@FORMATS.register("kimi_k2")
class KimiK2(ToolFormat):
    """`functions.NAME:NUMBER`, then JSON, between control tokens.

    Source: the chat template of Kimi-K2-Instruct and its tool-calling guide.
    """

    marks = (_KIMI_ALL_BEGIN, _KIMI_BEGIN)
    signs = breaks = (_KIMI_ALL_BEGIN,)

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        def call(head: re.Match[str]) -> Found | None:
            return _json_call(head, [_KIMI_END], head[1] or "")

        return scan(text, _KIMI_HEAD, call, frames=(_KIMI_ALL_BEGIN, _KIMI_ALL_END), end=_KIMI_END)

    def call_id(self, name: str, number: int) -> str:
        """Returns an id in the model's own numbering. The template repeats the id before each tool result."""
        return f"functions.{name}:{number}"


@FORMATS.register("mistral")
class Mistral(ToolFormat):
    """`[TOOL_CALLS]` and a JSON list of calls, or repeated `[TOOL_CALLS]NAME[ARGS]{...}` with an optional call id.

    Source: the chat templates of Mistral-7B-Instruct-v0.3 and Mistral-Small-3.2.
    """

    marks = ("[TOOL_CALLS]",)
    signs = marks

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return scan(text, _MISTRAL_HEAD, _mistral_call)

    def call_id(self, name: str, number: int) -> str:
        """Returns nine alphanumeric characters, because the template rejects any other id."""
        return secrets.token_hex(5)[:9]


def _mistral_call(head: re.Match[str]) -> Found | None:
    if head[1] is not None:
        return _json_call(head, (), head[1])
    got = json_at(head.string, head.end())
    if got is None or not isinstance(got[0], list):
        return None
    calls = [call for one in got[0] if (call := call_of(one)) is not None]
    return (calls, got[1]) if calls and len(calls) == len(got[0]) else None


@FORMATS.register("llama3")
class Llama3(ToolFormat):
    """`{"name": ..., "parameters": {...}}`, optionally after `<|python_tag|>`; several calls are separated by `;`.

    Without the tag, JSON is a call only if it names one of the tools, because the response itself may be JSON.
    Source: the chat templates of Llama 3.1 and 3.2.
    """

    marks = (_LLAMA_TAG, '{"name":')
    signs = ("<|eot_id|>", '"parameters"')

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        if _LLAMA_TAG in text:
            return scan(text, _LLAMA_TAGGED, _llama_call)
        known = list(functions(tools))  # a list, because the model may write a name of any type
        got = json_at(text, 0)
        meant = got is None or (isinstance(got[0], dict) and got[0].get("name") in known)
        return scan(text, _LLAMA_BARE, _llama_call) if meant else Calls((), text)


def _llama_call(head: re.Match[str]) -> Found | None:
    """Parses the call at `head`. Skips JSON that is malformed or not a call, along with everything inside it."""
    got = json_or_break(head.string, head.end())
    if isinstance(got, int):
        return [], got
    call = call_of(got[0])
    return [] if call is None else [call], got[1]


@FORMATS.register("deepseekv3")
class DeepSeekV3(ToolFormat):
    """DeepSeek V3 and R1: <call begin>function<sep>NAME, a fenced JSON block, <call end>.

    Source: the chat template of DeepSeek-V3.
    """

    marks = (_DEEPSEEK_ALL_BEGIN, _DEEPSEEK_BEGIN)
    signs: ClassVar[tuple[str, ...]] = (_DEEPSEEK_SEP, "```json")
    head: ClassVar[re.Pattern[str]] = _DEEPSEEK_FENCED
    ends: ClassVar[tuple[str, ...]] = ("```", _DEEPSEEK_END)

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        def call(head: re.Match[str]) -> Found | None:
            return _json_call(head, self.ends, (head[1] or "").strip())

        return scan(text, self.head, call, frames=(_DEEPSEEK_ALL_BEGIN, _DEEPSEEK_ALL_END), end=_DEEPSEEK_END)


@FORMATS.register("deepseekv31")
class DeepSeekV31(DeepSeekV3):
    """<call begin>NAME<sep>JSON<call end>. Source: the chat template of DeepSeek-V3.1."""

    signs = (_DEEPSEEK_SEP,)
    head = _DEEPSEEK_BARE
    ends = (_DEEPSEEK_END,)


@FORMATS.register("text", "none")
class NoCalls(ToolFormat):
    """For models without tool calls: the entire response is text."""

    marks = ()

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return Calls((), text)


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

    def can_constrain(self, prompt_end: str) -> bool:
        return False  # each response begins with the header of a channel


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
