"""A model that calls nothing: all that it writes is text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.agent.parsers import FORMATS, Calls, ToolFormat


@FORMATS.register("text", "none")
class NoCalls(ToolFormat):
    """No text is a call."""

    marks = ()

    def read(self, text: str, tools: Sequence[Any]) -> Calls:
        return Calls((), text)
