"""Hermes' format, which Qwen2.5 and Qwen3 write: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeated.

Source: the chat templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from slime.agent.messages import canonical_arguments
from slime.agent.parsers import FORMATS, Calls, ToolFormat

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)


@FORMATS.register("hermes", "qwen25")
class Hermes(ToolFormat):
    """JSON between marks."""

    marks = ("<tool_call>",)

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        found: list[tuple[str, str]] = []
        rest: list[str] = []
        at, odd = 0, False
        for match in _CALL.finditer(text):
            rest.append(text[at : match.start()])
            at = match.end()
            call = _call(match[1])
            if call is None:
                odd = True
                rest.append(match[0])
            else:
                found.append(call)
        tail = text[at:]
        odd = odd or self.marks[0] in tail
        rest.append(tail)
        left = "".join(rest)
        return Calls(tuple(found), left if odd else left.strip(), odd)


def _call(text: str) -> tuple[str, str] | None:
    try:
        value = json.loads(text)
        name, arguments = value["name"], value.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, canonical_arguments(arguments)
