"""Formats whose arguments are text between tags, and take their type from the tool's schema.

    qwen3_coder    <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>
    glm45          <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>

A value ends at the closing tag that the next tag of the format follows, so it may hold tags itself.
Source: the chat templates of Qwen3-Coder and GLM-4.5 (with line feeds between tags) and GLM-4.7 (without).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slime.agent.parsers import FORMATS, Calls, ToolFormat
from slime.agent.parsers.scan import Found, followed, scan, typed_arguments

_QWEN_HEAD = re.compile(r"(?:(<tool_call>)\s*)?<function=([^<>\n]*)>|<tool_call>|<function=")
_QWEN_PAIR = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.S)
_GLM_HEAD = re.compile(r"<tool_call>\s*([^<>\s]*)")
_GLM_PAIR = re.compile(
    r"\s*<arg_key>\s*([^<>]*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|</tool_call>))", re.S
)


@FORMATS.register("qwen3_coder")
class Qwen3Coder(ToolFormat):
    """Parameters in tags that name them. The model may leave `<tool_call>` out."""

    marks = ("<tool_call>", "<function=")
    signs = ("<tool_call>", "<function=", "<parameter=")

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return scan(text, _QWEN_HEAD, lambda head: _qwen(head, tools), end="</function>")


@FORMATS.register("glm45", "glm47")
class Glm45(ToolFormat):
    """Keys and values in tags."""

    marks = ("<tool_call>",)
    signs = ("<tool_call>", "<arg_key>")

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return scan(text, _GLM_HEAD, lambda head: _glm(head, tools), end="</tool_call>")


def _qwen(head: re.Match[str], tools: Sequence[Any]) -> Found | None:
    values, at = _pairs(head.string, head.end(), _QWEN_PAIR)
    end = followed(head.string, at, "</function>")
    if end is None or head[2] is None:
        return None
    closed = followed(head.string, end, "</tool_call>")
    call = typed_arguments(head[2].strip(), values, tools)
    if call is None or (head[1] and closed is None):
        return None
    return [call], end if closed is None else closed


def _glm(head: re.Match[str], tools: Sequence[Any]) -> Found | None:
    values, at = _pairs(head.string, head.end(), _GLM_PAIR)
    end = followed(head.string, at, "</tool_call>")
    call = typed_arguments(head[1], values, tools)
    return None if call is None or end is None else ([call], end)


def _pairs(text: str, at: int, pair: re.Pattern[str]) -> tuple[dict[str, str], int]:
    """Key -> value, and where the last one ends."""
    out: dict[str, str] = {}
    while match := pair.match(text, at):
        out[match[1]] = match[2]
        at = match.end()
    return out, at
