"""Formats whose calls are JSON: Hermes, Kimi K2, Mistral, Llama 3, DeepSeek; and that of a model that calls nothing."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from slime.agent.parsers import FORMATS, Calls, ToolFormat
from slime.agent.parsers.tagged import Found, call_of, followed, functions, json_at, json_or_break, named_call, scan

# Hermes' format, which Qwen2.5 and Qwen3 write: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeated.
#
# Source: the chat templates of Qwen2.5 and Qwen3.

_HERMES_HEAD = re.compile(r"<tool_call>")
_HERMES_END = "</tool_call>"


@FORMATS.register("hermes", "qwen25")
class Hermes(ToolFormat):
    """JSON between marks."""

    marks = ("<tool_call>",)
    signs = breaks = marks

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return scan(text, _HERMES_HEAD, _hermes_call, end=_HERMES_END)


def _hermes_call(head: re.Match[str]) -> Found | None:
    got = json_at(head.string, head.end())
    call = call_of(got[0]) if got else None
    end = followed(head.string, got[1], _HERMES_END) if got else None
    return None if call is None or end is None else ([call], end)


# Kimi K2's format: `functions.NAME:NUMBER`, then JSON, between marks that are tokens of their own.
#
# Source: the chat template of Kimi-K2-Instruct and its guide to calls.

_KIMI_ALL_BEGIN, _KIMI_ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_BEGIN, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_HEAD = re.compile(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.\-]+):\d+\s*<\|tool_call_argument_begin\|>|<\|tool_call_begin\|>"
)


@FORMATS.register("kimi_k2")
class KimiK2(ToolFormat):
    """A name with a number, and JSON."""

    marks = (_KIMI_ALL_BEGIN, _KIMI_BEGIN)
    signs = breaks = (_KIMI_ALL_BEGIN,)

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return scan(text, _KIMI_HEAD, _kimi_call, frames=(_KIMI_ALL_BEGIN, _KIMI_ALL_END), end=_KIMI_END)

    def call_id(self, name: str, number: int) -> str:
        """As the model counts its calls; the template heads each result with it."""
        return f"functions.{name}:{number}"


def _kimi_call(head: re.Match[str]) -> Found | None:
    got = json_at(head.string, head.end())
    call = named_call(head[1], got[0]) if got else None
    end = followed(head.string, got[1], _KIMI_END) if got else None
    return None if call is None or end is None else ([call], end)


# Mistral's formats: `[TOOL_CALLS]` and a list of calls in JSON, or `[TOOL_CALLS]NAME[ARGS]{...}`, repeated.
#
# Source: the chat templates of Mistral-7B-Instruct-v0.3 and Mistral-Small-3.2; the latter may write a call's id
# between.

_MISTRAL_HEAD = re.compile(r"\[TOOL_CALLS\]\s*(?:([^\s\[\]{}]+)(?:\[CALL_ID\][^\[\]{}]*)?\[ARGS\])?")


@FORMATS.register("mistral")
class Mistral(ToolFormat):
    """A list, or a name and arguments."""

    marks = ("[TOOL_CALLS]",)
    signs = marks

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return scan(text, _MISTRAL_HEAD, _mistral_call)

    def call_id(self, name: str, number: int) -> str:
        """Nine letters and digits: the template refuses any other."""
        return secrets.token_hex(5)[:9]


def _mistral_call(head: re.Match[str]) -> Found | None:
    got = json_at(head.string, head.end())
    if got is None:
        return None
    value, end = got
    if head[1] is not None:
        call = named_call(head[1], value)
        return None if call is None else ([call], end)
    listed = [call for one in value if (call := call_of(one)) is not None] if isinstance(value, list) else []
    return (listed, end) if listed and len(listed) == len(value) else None


# Llama 3's format: `{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or bare, several with `;` between.
#
# Without the tag, JSON with a name is a call only if it names one of the tools: an answer may be JSON too.
# Source: the chat templates of Llama 3.1 and 3.2.

_LLAMA_TAG = "<|python_tag|>"
_LLAMA_TAGGED = re.compile(r"<\|python_tag\|>|;(?=\s*\{)")
_LLAMA_BARE = re.compile(r'(?=\{"name":)|;(?=\s*\{)')


@FORMATS.register("llama3")
class Llama3(ToolFormat):
    """JSON that names a tool."""

    marks = (_LLAMA_TAG, '{"name":')
    signs = ("<|eot_id|>", '"parameters"')

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        if _LLAMA_TAG in text:
            return scan(text, _LLAMA_TAGGED, _llama_call)
        known = list(functions(tools))  # a name may be anything
        got = json_at(text, 0)
        meant = got is None or (isinstance(got[0], dict) and got[0].get("name") in known)
        return scan(text, _LLAMA_BARE, _llama_call) if meant else Calls((), text)


def _llama_call(head: re.Match[str]) -> Found | None:
    """Nothing inside JSON that is broken, or not a call itself, counts as one."""
    got = json_or_break(head.string, head.end())
    if isinstance(got, int):
        return [], got
    call = call_of(got[0])
    return [] if call is None else [call], got[1]


# DeepSeek's formats: the name of a function and its arguments between marks that are tokens of their own.
#
#     V3, R1     <call begin>function<sep>NAME, a fenced block of JSON, <call end>
#     V3.1       <call begin>NAME<sep>JSON<call end>
#
# Source: the chat templates of DeepSeek-V3 and DeepSeek-V3.1.

_DEEPSEEK_ALL_BEGIN, _DEEPSEEK_ALL_END = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
_DEEPSEEK_BEGIN, _DEEPSEEK_SEP, _DEEPSEEK_END = (
    "<\uff5ctool▁call▁begin\uff5c>",
    "<\uff5ctool▁sep\uff5c>",
    "<\uff5ctool▁call▁end\uff5c>",
)
_DEEPSEEK_FENCED = re.compile(rf"{_DEEPSEEK_BEGIN}\s*function\s*{_DEEPSEEK_SEP}([^<\n]*)\n\s*```json|{_DEEPSEEK_BEGIN}")
_DEEPSEEK_BARE = re.compile(rf"{_DEEPSEEK_BEGIN}([^<\n]*){_DEEPSEEK_SEP}|{_DEEPSEEK_BEGIN}")


@FORMATS.register("deepseekv3")
class DeepSeekV3(ToolFormat):
    """JSON in a fenced block."""

    marks = (_DEEPSEEK_ALL_BEGIN, _DEEPSEEK_BEGIN)
    signs = (_DEEPSEEK_SEP, "```json")

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return scan(
            text,
            _DEEPSEEK_FENCED,
            lambda head: _deepseek_call(head, "```"),
            frames=(_DEEPSEEK_ALL_BEGIN, _DEEPSEEK_ALL_END),
            end=_DEEPSEEK_END,
        )


@FORMATS.register("deepseekv31")
class DeepSeekV31(ToolFormat):
    """JSON behind the name."""

    marks = (_DEEPSEEK_ALL_BEGIN, _DEEPSEEK_BEGIN)
    signs = (_DEEPSEEK_SEP,)

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return scan(
            text,
            _DEEPSEEK_BARE,
            lambda head: _deepseek_call(head, ""),
            frames=(_DEEPSEEK_ALL_BEGIN, _DEEPSEEK_ALL_END),
            end=_DEEPSEEK_END,
        )


def _deepseek_call(head: re.Match[str], fence: str) -> Found | None:
    """None too for a head that begins a call and names none."""
    got = json_at(head.string, head.end())
    call = named_call((head[1] or "").strip(), got[0]) if got else None
    inner = followed(head.string, got[1], fence) if got else None
    end = followed(head.string, inner, _DEEPSEEK_END) if inner is not None else None
    return None if call is None or end is None else ([call], end)


# A model that calls nothing: all that it writes is text.


@FORMATS.register("text", "none")
class NoCalls(ToolFormat):
    """No text is a call."""

    marks = ()

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return Calls((), text)
