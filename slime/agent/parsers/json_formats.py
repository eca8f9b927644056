"""Formats with JSON calls: Hermes, Kimi K2, Mistral, Llama 3 and DeepSeek; and one for models without calls."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, ClassVar

from slime.agent.parsers import FORMATS, Calls, ToolFormat
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
