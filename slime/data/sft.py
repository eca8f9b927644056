"""Supervised fine-tuning: a conversation to ids and a loss mask, proven from the chat template by rendering prefixes.

What the model would write in a turn is the difference between the conversation up to that turn with the generation
prompt and the conversation including it, up to the token that ends the turn. This is only right if both are prefixes of
the whole: a template that rewrites history (Qwen3 drops earlier reasoning) is caught and shown, never masked by guess.

Invariants
1. A trained position is one that the model itself would have sampled after exactly the ids before it.
2. Ids after the last trained token and before the first are context or absent; the loss mask starts and ends with 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.core.errors import DataError
from slime.data.chat import ChatRenderer, Rendered

STEP_MASK_KEY = "step_loss_mask"
"""`0` in an assistant message: context only, not trained."""


@dataclass(frozen=True, slots=True)
class SftTokens:
    """One conversation of T ids; the last R, from the first trained one on, are the response."""

    tokens: tuple[int, ...]
    """[T] truncated after the last trained token."""
    loss_mask: tuple[int, ...]
    """[R] 1 where the token is trained, 0 on the turns between."""

    @property
    def response_length(self) -> int:
        return len(self.loss_mask)


def conversation_of(prompt: Any, label: Any, *, rendered: bool = False) -> list[Any] | None:
    """The messages that a row says: its prompt, or a text as the question and a text as its label as the answer.

    None for any other row, and for a text that the chat template has made (`rendered`).
    """
    if isinstance(prompt, str) and isinstance(label, str) and prompt and label and not rendered:
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": label}]
    return prompt if isinstance(prompt, list) else None


def sft_tokens(
    messages: Sequence[Mapping[str, Any]], chat: ChatRenderer, *, tools: Sequence[Any] | None = None
) -> SftTokens:
    """Ids and mask of a conversation; every assistant message with `step_loss_mask` absent or 1 is trained.

    Raises `DataError` if there is none, if the template refuses the messages, if it is not prefix-stable at a trained
    message, with the counter-example, or if it leaves out what a trained message says.
    """
    trained = [i for i, m in enumerate(messages) if m.get("role") == "assistant" and int(m.get(STEP_MASK_KEY, 1)) != 0]
    if not trained:
        raise DataError(f"got no trained assistant message in {len(messages)}; nothing would be learned from this row")
    if trained[0] == 0:
        raise DataError("got a conversation that starts with a trained assistant message; it needs a prompt before it")
    clean = [{k: v for k, v in m.items() if k != STEP_MASK_KEY} for m in messages]
    whole = chat.render(clean, tools=tools, add_generation_prompt=False)
    # Bounds in `whole.marked`: context up to the first, trained up to the second, context up to the third, and so on.
    bounds = [0]
    for i in trained:
        before = chat.render_prefix(clean, i, tools=tools, add_generation_prompt=True)
        after = chat.render_prefix(clean, i + 1, tools=tools, add_generation_prompt=False)
        for prefix in (before, after):
            _require_prefix(prefix, whole, i)
        start, stop = len(before.marked), len(before.marked) + _turn_length(after.part(len(before.marked)), chat)
        if not bounds[-1] <= start < stop:
            raise DataError(f"the chat template gives message {i} no text of its own after its generation prompt")
        _require_said(clean[i], tools, whole.part(start, stop).text, whole.text, i)
        bounds += [start, stop]
    parts = [chat.encode(whole.part(a, b)) for a, b in itertools.pairwise(bounds)]
    _require_faithful(parts, whole.part(0, bounds[-1]), chat)
    tokens = [token for part in parts for token in part]
    mask = [i % 2 for i, part in enumerate(parts) for _ in part]
    return SftTokens(tuple(tokens), tuple(mask[len(parts[0]) :]))


def _turn_length(turn: Rendered, chat: ChatRenderer) -> int:
    """Characters of `turn` that the model writes: all up to its last control token, which ends the turn."""
    end = max((turn.marked.rfind(c) + len(c) for c in chat.structural if c in turn.marked), default=0)
    return end or len(turn.marked)


def _require_prefix(prefix: Rendered, whole: Rendered, message: int) -> None:
    if whole.marked.startswith(prefix.marked):
        return
    same = next(i for i, c in enumerate(prefix.marked) if whole.marked[i : i + 1] != c)
    low = max(same - 30, 0)
    raise DataError(
        f"the chat template is not prefix-stable at message {message}: up to it the text reads "
        f"{prefix.part(low, same + 60).text!r}, but within the whole conversation {whole.part(low, same + 60).text!r}, "
        "because the template rewrites earlier turns; do: end the conversation with that message, set "
        f'"{STEP_MASK_KEY}": 0 on the turns before the last, or use a template that keeps history'
    )


def _require_said(message: Mapping[str, Any], tools: Sequence[Any] | None, turn: str, whole: str, number: int) -> None:
    """What the message says, its tool calls included, is in the turn, and the tools in the conversation."""
    content = message.get("content")
    missing = [] if not isinstance(content, str) or content.rpartition("</think>")[2].strip() in turn else ["content"]
    missing += [f"tool call {n}" for n in _functions(message.get("tool_calls")) if n not in turn]
    missing += [f"tool {n}" for n in _functions(tools) if n not in whole]
    if missing:
        raise DataError(
            f"the chat template leaves out {', '.join(missing)} of message {number}, whose turn reads {turn[:200]!r}; "
            "do: use a template that knows tools, or write messages as it wants them (some: content null beside calls)"
        )


def _functions(entries: Sequence[Any] | None) -> list[str]:
    """Names of tools or tool calls, with or without the `function` level."""
    return [str(e.get("function", e).get("name", "")) for e in entries or () if isinstance(e, Mapping)]


def _require_faithful(parts: Sequence[Sequence[int]], text: Rendered, chat: ChatRenderer) -> None:
    """Parts are encoded apart, as the prompt is in generation; where that differs from the whole it must decode."""
    joined = [token for part in parts for token in part]
    if joined != chat.encode(text) and chat.decode(joined) != text.text:
        raise DataError(
            f"the ids of prompt and turns, put together, decode to {chat.decode(joined)[:200]!r} and not to "
            f"{text.text[:200]!r}, because this tokenizer encodes a text differently when split; leave this row out"
        )
