"""Mistral's formats: `[TOOL_CALLS]` and a list of calls in JSON, or `[TOOL_CALLS]NAME[ARGS]{...}`, repeated.

Source: the chat templates of Mistral-7B-Instruct-v0.3 and Mistral-Small-3.2; the latter may write a call's id between.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from slime.agent.parsers import FORMATS, Calls, ToolFormat
from slime.agent.parsers.scan import Found, call_of, json_at, named_call, scan

_HEAD = re.compile(r"\[TOOL_CALLS\]\s*(?:([^\s\[\]{}]+)(?:\[CALL_ID\][^\[\]{}]*)?\[ARGS\])?")


@FORMATS.register("mistral")
class Mistral(ToolFormat):
    """A list, or a name and arguments."""

    marks = ("[TOOL_CALLS]",)
    signs = marks

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return scan(text, _HEAD, _call)

    def call_id(self, name: str, number: int) -> str:
        """Nine letters and digits: the template refuses any other."""
        return secrets.token_hex(5)[:9]


def _call(head: re.Match[str]) -> Found | None:
    got = json_at(head.string, head.end())
    if got is None:
        return None
    value, end = got
    if head[1] is not None:
        call = named_call(head[1], value)
        return None if call is None else ([call], end)
    listed = [call for one in value if (call := call_of(one)) is not None] if isinstance(value, list) else []
    return (listed, end) if listed and len(listed) == len(value) else None
