"""One form of a conversation, whatever wire format it came by; chat templates and the matching of histories read it.

Invariants
1. Two messages are equal exactly if a chat template cannot tell them apart: identifiers that clients make up (of
   calls whose template writes none) are kept for the template, and left out of `key`.
2. Arguments of a call are the JSON text of an object with sorted keys and no spaces, or `ILL_FORMED` says that the
   model wrote something else, which is then kept as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function, as a model asked for it."""

    id: str
    """By which its result names it."""
    name: str
    arguments: str
    """JSON text; see invariant 2."""

    @property
    def decoded(self) -> dict[str, Any]:
        """The arguments as a template reads them; ill-formed ones as the text that the model wrote."""
        value = _object(self.arguments)
        return {"_raw_arguments": self.arguments} if value is None else value


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    """One of `ROLES`."""
    text: str = ""
    reasoning: str | None = None
    """What an assistant thought before its answer; None: its wire format carries none, or there was none."""
    calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    call_id: str | None = None
    """Of a tool's result: the call that it answers."""
    name: str | None = None
    """Of a tool's result: the function."""

    def for_template(self) -> dict[str, Any]:
        """As the chat templates of transformers read it."""
        out: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.decoded}}
                for c in self.calls
            ]
        if self.call_id is not None:
            out["tool_call_id"] = self.call_id
        if self.name is not None:
            out["name"] = self.name
        return out

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes it this message, without thinking: clients need not send that back."""
        return (self.role, self.text.strip(), tuple((c.name, c.arguments) for c in self.calls))


def canonical_arguments(given: str | Mapping[str, Any] | None) -> str:
    """The JSON text of an object in one spelling; other text stays as it is."""
    if isinstance(given, str):
        value = _object(given)
        if value is None:
            return given
    else:
        value = dict(given or {})
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
