"""Llama 3's format: `{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or bare, several with `;` between.

Without the tag, JSON with a name is a call only if it names one of the tools: an answer may be JSON too.
Source: the chat templates of Llama 3.1 and 3.2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slime.agent.parsers import FORMATS, Calls, ToolFormat
from slime.agent.parsers.scan import Found, call_of, functions, json_at, json_or_break, scan

_TAG = "<|python_tag|>"
_TAGGED = re.compile(r"<\|python_tag\|>|;(?=\s*\{)")
_BARE = re.compile(r'(?=\{"name":)|;(?=\s*\{)')


@FORMATS.register("llama3")
class Llama3(ToolFormat):
    """JSON that names a tool."""

    marks = (_TAG, '{"name":')
    signs = ("<|eot_id|>", '"parameters"')

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        if _TAG in text:
            return scan(text, _TAGGED, _call)
        known = list(functions(tools))  # a name may be anything
        got = json_at(text, 0)
        meant = got is None or (isinstance(got[0], dict) and got[0].get("name") in known)
        return scan(text, _BARE, _call) if meant else Calls((), text)


def _call(head: re.Match[str]) -> Found | None:
    """Nothing inside JSON that is broken, or not a call itself, counts as one."""
    got = json_or_break(head.string, head.end())
    if isinstance(got, int):
        return [], got
    call = call_of(got[0])
    return [] if call is None else [call], got[1]
