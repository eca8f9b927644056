"""Hermes' format, which Qwen2.5 and Qwen3 write: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeated.

Source: the chat templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slime.agent.parsers import FORMATS, Calls, ToolFormat
from slime.agent.parsers.scan import Found, call_of, followed, json_at, scan

_HEAD = re.compile(r"<tool_call>")
_END = "</tool_call>"


@FORMATS.register("hermes", "qwen25")
class Hermes(ToolFormat):
    """JSON between marks."""

    marks = ("<tool_call>",)
    signs = breaks = marks

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return scan(text, _HEAD, _call, end=_END)


def _call(head: re.Match[str]) -> Found | None:
    got = json_at(head.string, head.end())
    call = call_of(got[0]) if got else None
    end = followed(head.string, got[1], _END) if got else None
    return None if call is None or end is None else ([call], end)
