"""A conversation as token ids: the first prompt, and what stands between a sampled turn and the next one.

A chat template writes text, and text that a model wrote, encoded again, need not be the ids that it sampled; templates
also drop thinking, trim and reorder. So of an assistant's message nothing is ever encoded. Between two sampled turns
the template is asked for the whole conversation with a word in place of each answer; what it writes behind the end
token of the last one is the suffix. The next prompt is the tokens that there are, and the suffix.

Invariants
1. The first id of a suffix follows an end token, where every tokenizer splits: suffix and tokens before it, encoded
   apart, are what they would be together.
2. Control tokens in messages are spelled out (`ChatRenderer`); those of a suffix are the template's own.
3. Every message of a suffix stands in it, in order. What a template moves or leaves out is a `NotAppended`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

from slime.agent.messages import Message
from slime.core.errors import DataError
from slime.data.chat import ChatRenderer, Rendered


class Origin(str, Enum):
    """Where a token comes from."""

    SAMPLED = "sampled"
    TEMPLATE = "template"
    SYSTEM = "system"
    USER = "user"
    TOOL = "tool"
    ASSISTANT = "assistant"
    """Text of an assistant that this session's model did not sample: an example, a summary."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids with the origin of each."""

    ids: tuple[int, ...]
    origins: tuple[Origin, ...]

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.origins), (len(self.ids), len(self.origins))


class NotAppended(DataError):
    """The template writes the conversation otherwise than as what was there and something behind it."""


class ConversationTemplate:
    """One model's chat template, as an agent's conversation needs it."""

    def __init__(self, chat: ChatRenderer, end_ids: Sequence[int]) -> None:
        """`end_ids`: tokens that end a turn, all of them; in some families that is the header of the next one.

        Raises `DataError` without one.
        """
        if not end_ids:
            raise DataError("got no token that ends a turn; the checkpoint's generation_config.json names none")
        self.chat, self.end_ids = chat, frozenset(end_ids)
        self._ends = sorted({chat.decode([i]) for i in end_ids}, key=len, reverse=True)

    @cached_property
    def writes_tools(self) -> bool:
        """Whether a prompt says which tools there are. Some templates, DeepSeek-V3's among them, do not."""
        tool = {"name": "probe_of_tools", "description": "", "parameters": {"type": "object", "properties": {}}}
        asked = [{"role": "user", "content": "?"}]
        try:
            return "probe_of_tools" in self.chat.render(asked, tools=[{"type": "function", "function": tool}]).marked
        except DataError:
            return False

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Tokens:
        """The whole conversation, up to where the model goes on.

        Raises `DataError` with the template's complaint, or for tools that it does not write.
        """
        if tools and not self.writes_tools:
            raise DataError(
                f"got {len(tools)} tools, which the chat template does not write, so the model could not know of them; "
                "give one that does as --chat-template FILE"
            )
        rendered = self.chat.render([m.for_template() for m in messages], tools=list(tools) or None)
        return self._tokens(rendered, messages, in_order=False)

    def suffix(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Any] = (), *, last_id: int | None
    ) -> Tokens:
        """What follows the last sampled token, up to where the model goes on.

        `before` ends with the sampled turn; `new` are the messages behind it. `last_id`: the token sampled last, None
        if nothing was. Raises `NotAppended`.
        """
        assert before and before[-1].role == "assistant", "a suffix follows a sampled turn"
        assert all(m.role != "assistant" for m in new), "an assistant's message would be encoded"
        everything = self._behind(before, new, tools)
        end = self.first_end(everything.marked)
        if end is None:
            raise NotAppended(
                f"the chat template writes no end token ({', '.join(self._ends)}) behind an assistant's turn, so "
                "nothing says where the next message begins"
            )
        start, token = end
        own = self._id(token)
        rendered = everything.part(start)
        tokens = self._tokens(rendered, new, in_order=True)
        if tokens.ids[0] != own:
            raise NotAppended(f"the tokenizer does not split at {token!r}, which ends a turn")
        return Tokens(tokens.ids[1:], tokens.origins[1:]) if last_id in self.end_ids else tokens

    def first_end(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """(place, token) of the first end token in a text from there on."""
        found = [(text.find(token, start), token) for token in self._ends]
        return min(((at, token) for at, token in found if at >= 0), default=None)

    def _behind(self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Any]) -> Rendered:
        """What the template writes behind the word that stands for the last answer."""
        words = "".join(m.text for m in new)
        word = "turn"
        while word in words:
            word += "q"
        complaint: Exception | None = None
        for with_calls in (True, False):
            stand = [self._stand(m, f"x{word}x{i}x", with_calls) for i, m in enumerate(before)]
            try:
                rendered = self.chat.render(
                    [m.for_template() for m in (*stand, *new)], tools=list(tools) or None, add_generation_prompt=True
                )
            except DataError as error:  # some refuse calls, or several of them
                complaint = complaint or error
                continue
            mark = f"x{word}x{len(before) - 1}x"
            at = rendered.marked.rfind(mark)
            if at >= 0:
                return rendered.part(at + len(mark))
        raise NotAppended(f"the chat template leaves the text of an assistant's turn out ({complaint})")

    @staticmethod
    def _stand(message: Message, word: str, with_calls: bool) -> Message:
        """A message of the past: only its place matters, and a template that counts or pairs calls must find them."""
        kept = message.calls if with_calls else ()
        return replace(message, text=word, reasoning=None, calls=kept)

    def _id(self, token: str) -> int:
        (own,) = (i for i in self.end_ids if self.chat.decode([i]) == token)
        return own

    def _tokens(self, rendered: Rendered, messages: Sequence[Message], *, in_order: bool) -> Tokens:
        """Encodes; says of each token whose text it is. Raises `NotAppended` for a message that is not there."""
        spans: list[tuple[int, int, Origin]] = []
        at = 0
        for message in messages:
            text = self.chat.disarmed(message.text, rendered).strip()
            if not text:
                continue
            found = rendered.marked.find(text, at if in_order else 0)
            if found < 0 and in_order:
                raise NotAppended(
                    f"the chat template does not write a {message.role}'s message behind what was there: {text[:80]!r}"
                )
            if found >= 0:
                spans.append((found, found + len(text), Origin(message.role)))
                at = found + len(text) if in_order else at
        ids, starts = self.chat.encode_with_starts(rendered)
        return Tokens(tuple(ids), tuple(_origins(starts, sorted(spans))))


def _origins(starts: Sequence[int], spans: Sequence[tuple[int, int, Origin]]) -> list[Origin]:
    """[T] of tokens that begin at these characters. Spans do not overlap, and are sorted."""
    out, i = [], 0
    for start in starts:
        while i < len(spans) and spans[i][1] <= start:
            i += 1
        inside = i < len(spans) and spans[i][0] <= start
        out.append(spans[i][2] if inside else Origin.TEMPLATE)
    return out
