"""Kimi K2's format: `functions.NAME:NUMBER`, then JSON, between marks that are tokens of their own.

Source: the chat template of Kimi-K2-Instruct and its guide to calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slime.agent.parsers import FORMATS, Calls, ToolFormat
from slime.agent.parsers.scan import Found, followed, json_at, named_call, scan

_ALL_BEGIN, _ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _END = "<|tool_call_begin|>", "<|tool_call_end|>"
_HEAD = re.compile(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.\-]+):\d+\s*<\|tool_call_argument_begin\|>|<\|tool_call_begin\|>"
)


@FORMATS.register("kimi_k2")
class KimiK2(ToolFormat):
    """A name with a number, and JSON."""

    marks = (_ALL_BEGIN, _BEGIN)
    signs = breaks = (_ALL_BEGIN,)

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return scan(text, _HEAD, _call, frames=(_ALL_BEGIN, _ALL_END), end=_END)

    def call_id(self, name: str, number: int) -> str:
        """As the model counts its calls; the template heads each result with it."""
        return f"functions.{name}:{number}"


def _call(head: re.Match[str]) -> Found | None:
    got = json_at(head.string, head.end())
    call = named_call(head[1], got[0]) if got else None
    end = followed(head.string, got[1], _END) if got else None
    return None if call is None or end is None else ([call], end)
