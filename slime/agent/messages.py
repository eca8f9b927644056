"""The common form of conversations, shared by all wire formats, chat templates and comparisons of histories.

Invariants
1. Two messages are the same (`Message.same`) if they say the same: clients write numbers, white space and JSON in their
   own way. Call ids that clients make up are kept for the template, but are not compared.
2. The arguments of a call are the JSON text of an object with sorted keys and no spaces. Text that is not a JSON object
   stays as the model wrote it.
3. No text holds a lone surrogate, which is not Unicode: it becomes U+FFFD.
4. Two images are the same if their pixels are (`slime.data.images.ConversationImages`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SURROGATES = re.compile("[\ud800-\udfff]")
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

    def same(self, other: ToolCall) -> bool:
        """Whether both call the same function with equal arguments."""
        if self.name != other.name:
            return False
        return self.arguments == other.arguments or comparable(self.arguments) == comparable(other.arguments)


@dataclass(frozen=True, slots=True)
class Picture:
    """An image in a message."""

    at: int
    """Number of characters of the message's text that precede the image."""
    digest: str
    """As in `Sample.images`."""
    num_tokens: int


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
    stop: str = ""
    """The stop string that ended the answer: its tokens are sampled, but the text ends before it."""
    images: tuple[Picture, ...] = ()
    """Sorted by `at`; empty for an assistant."""

    @property
    def is_empty(self) -> bool:
        """Whether an answer has neither text nor thinking nor calls."""
        return not (self.text or self.reasoning or self.calls)

    def texts(self) -> list[str]:
        """Returns the text before each image, and the text after the last one."""
        ends = [image.at for image in self.images]
        return [self.text[start:end] for start, end in zip([0, *ends], [*ends, None], strict=True)]

    def content(self) -> str | list[dict[str, Any]]:
        """Returns the text, or with images, the parts that chat templates expect."""
        if not self.images:
            return self.text
        parts: list[dict[str, Any]] = []
        for number, text in enumerate(self.texts()):
            if number:
                parts.append({"type": "image"})
            if text:
                parts.append({"type": "text", "text": text})
        return parts

    def for_template(self) -> dict[str, Any]:
        out: dict[str, Any] = {"role": self.role, "content": self.content()}
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

    def same(self, other: Message) -> bool:
        """Whether both say the same. Ignores thinking (see `thought`), which clients need not send back.

        The text of an assistant may differ in white space, since the session keeps the sampled tokens in any case, and
        a client may put back the stop string that ended it, which those tokens contain.
        """
        if self.role != other.role or len(self.calls) != len(other.calls):
            return False
        if self.images != other.images and not self._same_images(other):
            return False
        if self.text != other.text and not any(_reads_as(text, other) for text in {self.text, self.text + self.stop}):
            return False
        return all(a.same(b) for a, b in zip(self.calls, other.calls, strict=True))

    def _same_images(self, other: Message) -> bool:
        """Whether both have the same images between the same texts, except for white space around the texts."""
        digests = ([image.digest for image in one.images] for one in (self, other))
        ours, theirs = ([text.strip() for text in one.texts()] for one in (self, other))
        return next(digests) == next(digests) and ours == theirs

    def thought(self) -> list[str]:
        """Returns the words of the thinking."""
        return (self.reasoning or "").split()


def _reads_as(text: str, other: Message) -> bool:
    return text.strip() == other.text.strip() or (other.role == "assistant" and text.split() == other.text.split())


def canonical_arguments(given: str | Mapping[str, Any] | None) -> str:
    """Returns the canonical JSON text of an object (invariant 2); any other text is returned unchanged."""
    value = _object(given) if isinstance(given, str) else dict(given or {})
    if value is None:
        return str(given)
    return _SURROGATES.sub("\ufffd", json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))


def comparable(arguments: str) -> str:
    """Returns a text that is equal for all forms in which clients write the same arguments.

    JavaScript has one type of numbers, doubles: it writes 1.0 as 1, 1e3 as 1000, and rounds integers above 2^53. It
    writes numbers that are not finite as null.
    """
    value = _object(arguments)
    return arguments.strip() if value is None else json.dumps(_in_doubles(value), sort_keys=True)


def _in_doubles(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_doubles(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_in_doubles(one) for one in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            return None
        return number + 0.0 if math.isfinite(number) else None  # -0.0 becomes 0.0, as in JavaScript
    return value


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
