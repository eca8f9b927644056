"""DeepSeek's formats: the name of a function and its arguments between marks that are tokens of their own.

    V3, R1     <call begin>function<sep>NAME, a fenced block of JSON, <call end>
    V3.1       <call begin>NAME<sep>JSON<call end>

Source: the chat templates of DeepSeek-V3 and DeepSeek-V3.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slime.agent.parsers import FORMATS, Calls, ToolFormat
from slime.agent.parsers.scan import Found, followed, json_at, named_call, scan

_ALL_BEGIN, _ALL_END = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
_BEGIN, _SEP, _END = "<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁sep\uff5c>", "<\uff5ctool▁call▁end\uff5c>"
_FENCED = re.compile(rf"{_BEGIN}\s*function\s*{_SEP}([^<\n]*)\n\s*```json|{_BEGIN}")
_BARE = re.compile(rf"{_BEGIN}([^<\n]*){_SEP}|{_BEGIN}")


@FORMATS.register("deepseekv3")
class DeepSeekV3(ToolFormat):
    """JSON in a fenced block."""

    marks = (_ALL_BEGIN, _BEGIN)
    signs = (_SEP, "```json")

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return scan(text, _FENCED, lambda head: _call(head, "```"), frames=(_ALL_BEGIN, _ALL_END), end=_END)


@FORMATS.register("deepseekv31")
class DeepSeekV31(ToolFormat):
    """JSON behind the name."""

    marks = (_ALL_BEGIN, _BEGIN)
    signs = (_SEP,)

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return scan(text, _BARE, lambda head: _call(head, ""), frames=(_ALL_BEGIN, _ALL_END), end=_END)


def _call(head: re.Match[str], fence: str) -> Found | None:
    """None too for a head that begins a call and names none."""
    got = json_at(head.string, head.end())
    call = named_call((head[1] or "").strip(), got[0]) if got else None
    inner = followed(head.string, got[1], fence) if got else None
    end = followed(head.string, inner, _END) if inner is not None else None
    return None if call is None or end is None else ([call], end)
