"""The common form of conversations, shared by all wire formats, chat templates and comparisons of histories.

Invariants
1. Two messages are equal (`key`) if and only if a chat template cannot tell them apart. Call ids that clients make up
   are kept for the template, but are not part of `key`.
2. The arguments of a call are the JSON text of an object with sorted keys and no spaces. Text that is not a JSON object
   stays as the model wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    """Id by which a tool result refers to the call."""
    name: str
    arguments: str
    """JSON text, see invariant 2."""

    @property
    def decoded(self) -> dict[str, Any]:
        """The arguments as an object, for templates; malformed arguments are stored under `_raw_arguments`."""
        value = _object(self.arguments)
        return {"_raw_arguments": self.arguments} if value is None else value


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    """One of `ROLES`."""
    text: str = ""
    reasoning: str | None = None
    """The assistant's thinking before its answer; None if there is none or the wire format does not carry it."""
    calls: tuple[ToolCall, ...] = ()
    """The assistant's tool calls."""
    call_id: str | None = None
    """For a tool result: id of the call that it answers."""
    name: str | None = None
    """For a tool result: name of the function."""

    def for_template(self) -> dict[str, Any]:
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
        """Identity for comparisons. Excludes thinking, which clients need not send back."""
        return (self.role, self.text.strip(), tuple((c.name, c.arguments) for c in self.calls))


def canonical_arguments(given: str | Mapping[str, Any] | None) -> str:
    """Returns the canonical JSON text of an object (invariant 2); any other text is returned unchanged."""
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
