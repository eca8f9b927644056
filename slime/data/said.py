"""What a message of an assistant says, and whether the text that a chat template made of it says the same.

Templates leave things out without a word: reasoning, all calls but the first, content beside a call. A row whose turn
does not say what its message says would train the model to say less, so it is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

Message = Mapping[str, Any]

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message in which data sets keep reasoning; a template reads one of them at most."""
_JSON_LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"separators": (",", ":")},
    {"indent": 4},
    {"indent": 2},
    {"sort_keys": True},
)


def unsaid(message: Message, turn: str) -> list[str]:
    """Names of what the message says and its turn does not: reasoning, content, calls, arguments of calls.

    They are looked for in this order, each behind the one before, so that a name in the content counts as no call.
    """
    missing: list[str] = []
    at = 0
    for what, texts in (("reasoning", _reasoning(message)), ("content", _content(message))):
        for text in texts:
            found = turn.find(text.strip(), at)
            if found < 0:
                missing.append(what)
            else:
                at = found + len(text.strip())
    for call in calls_of(message):
        name = str(call.get("name", ""))
        found = turn.find(name, at)
        if found < 0:
            missing.append(f"tool call {name}")
            continue
        behind = found + len(name)
        end = _end_of_arguments(call.get("arguments"), turn, behind)
        if end is None:
            missing.append(f"arguments of tool call {name}")
        at = behind if end is None else end
    return missing


def calls_of(message: Message) -> list[Mapping[str, Any]]:
    """Name and arguments of each call, with or without the `function` level."""
    return functions(message.get("tool_calls"))


def functions(entries: Any) -> list[Mapping[str, Any]]:
    """Tools or calls, without the `function` level."""
    return [e.get("function", e) for e in entries or () if isinstance(e, Mapping)]


def _reasoning(message: Message) -> list[str]:
    texts: list[str] = [message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)]
    for text in _texts(message.get("content")):
        thought, closed, _ = text.rpartition("</think>")
        texts += [thought.rpartition("<think>")[2]] if closed else []
    return list(dict.fromkeys(text.strip() for text in texts))


def thought_of(message: Message) -> str:
    """What a message thinks, in a field of its own or within its content; empty if it does not."""
    return next(iter(_reasoning(message)), "")


def _content(message: Message) -> list[str]:
    return [text.rpartition("</think>")[2] for text in _texts(message.get("content"))]


def _texts(content: Any) -> list[str]:
    """Content is a text, or parts of which some are texts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | tuple):
        return []
    found = [part if isinstance(part, str) else part.get("text") for part in content if isinstance(part, str | Mapping)]
    return [text for text in found if isinstance(text, str)]


def _end_of_arguments(arguments: Any, turn: str, start: int) -> int | None:
    """Where the arguments end that the turn says from `start` on; None if it does not say all of them."""
    spellings = [arguments] if isinstance(arguments, str) else list(_spellings(arguments or {}))
    ends = [turn.find(text, start) + len(text) for text in spellings if text in turn[start:]]
    if ends:
        return min(ends)
    if not isinstance(arguments, Mapping):
        return None if arguments else start
    if arguments and str(dict(arguments)) in turn[start:]:  # pasted as Python writes an object, not as JSON
        return None
    end = start
    for key, value in arguments.items():
        at = turn.find(str(key), start)
        leaf_ends = [_end_of_leaf(leaf, turn, at + len(str(key))) for leaf in _leaves(value)] if at >= 0 else [None]
        for found in leaf_ends:
            if found is None:
                return None
            end = max(end, found)
    return end


def _end_of_leaf(leaf: Any, turn: str, start: int) -> int | None:
    texts = [str(leaf), *(json.dumps(leaf, ensure_ascii=ascii_only) for ascii_only in (False, True))]
    # A number is not found within a longer one.
    edge = "" if isinstance(leaf, str) else r"\b"
    found = [re.compile(edge + re.escape(text) + edge).search(turn, start) for text in texts]
    return min((match.end() for match in found if match), default=None)


def _leaves(value: Any) -> Iterator[Any]:
    """Keys and values inside, where a template may write an object in any layout."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _spellings(value: Any) -> Iterator[str]:
    for layout in _JSON_LAYOUTS:
        for ascii_only in (False, True):
            yield json.dumps(value, ensure_ascii=ascii_only, **layout)


def decoded(arguments: Any) -> Any:
    """Arguments of a call as an object: a template encodes them, and would encode a text again."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except ValueError:  # another text is what the model wrote
        return arguments
    return value if isinstance(value, dict) else arguments


def encoded(arguments: Any) -> Any:
    """Arguments of a call as JSON text, as the templates want it that only paste them."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments
