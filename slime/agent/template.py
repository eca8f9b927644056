"""A conversation as token ids: the first prompt, and what stands between a sampled turn and the next one.

A chat template writes text, and text that a model wrote, encoded again, need not be the ids that it sampled; templates
also drop thinking, trim and reorder. So of an assistant's message nothing is ever encoded. Between two sampled turns
the template is asked for the whole conversation with a word in place of each answer; what it writes behind the last
one, from the token that ends that turn on, is the suffix. The next prompt is the tokens that there are, and the suffix.

Which token ends a turn depends on what follows it: GLM's templates write nothing there but the header of the next
message, gpt-oss' another token than behind the last answer. A model may end its turn with any of its end tokens, so the
two need not agree. Then the suffix goes behind the tokens before the model's, which is left behind (`Suffix`).

Invariants
1. A suffix begins at a control token, where every tokenizer splits: suffix and tokens before it, encoded apart, are
   what they would be together.
2. Control tokens in messages are spelled out (`ChatRenderer`); those of a suffix are the template's own.
3. Every message of a suffix stands in it, in order. What a template moves or leaves out is a `NotAppended`.
4. Tokens and suffix, joined, hold what the template writes from the end of the turn on, and no end token beside it.
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

NO_TOOLS = (
    "got tools, which the chat template does not write, so the model could not know of them; give one that does as "
    "--chat-template FILE"
)


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


@dataclass(frozen=True, slots=True)
class Suffix(Tokens):
    """What follows a sampled turn."""

    other_end: bool = False
    """The model ended the turn with another token than the template does before these messages. The suffix has the
    template's, and follows the sampled tokens without that last one."""


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
            raise DataError(NO_TOOLS)
        rendered = self.chat.render([m.for_template() for m in messages], tools=list(tools) or None)
        return self._tokens(rendered, messages, in_order=False)

    def suffix(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Any] = (), *, last_id: int | None
    ) -> Suffix:
        """What follows the sampled tokens, up to where the model goes on.

        `before` ends with the sampled turn; `new` are the messages behind it. `last_id`: the token sampled last, None
        if nothing was. Raises `NotAppended`.
        """
        assert before and before[-1].role == "assistant", "a suffix follows a sampled turn"
        assert all(m.role != "assistant" for m in new), "an assistant's message would be encoded"
        rendered = self._behind(before, new, tools)
        tokens = self._tokens(rendered, new, in_order=True)
        end = self.chat.decode(tokens.ids[:1])
        if not end or not rendered.marked.startswith(end) or not self.chat.control_ids.issuperset(tokens.ids[:1]):
            raise NotAppended(
                f"the chat template writes {rendered.marked[:40]!r} behind an assistant's turn, which begins with no "
                "control token of the tokenizer, so nothing says where the turn ends"
            )
        if last_id == tokens.ids[0]:
            return Suffix(tokens.ids[1:], tokens.origins[1:])
        return Suffix(tokens.ids, tokens.origins, other_end=last_id in self.end_ids)

    def first_end(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """(place, token) of the first end token in a text from there on."""
        found = [(text.find(token, start), token) for token in self._ends]
        return min(((at, token) for at, token in found if at >= 0), default=None)

    def _behind(self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Any]) -> Rendered:
        """What the template writes from the end of the last answer on."""
        words = "".join(m.text for m in new)
        word = "turn"
        while word in words:
            word += "q"
        mark = f"x{word}x{len(before) - 1}x"
        complaint: Exception | None = None
        for with_calls in (True, False):
            stand = [self._stand(m, f"x{word}x{i}x", with_calls) for i, m in enumerate(before)]
            messages = [m.for_template() for m in (*stand, *new)]
            try:
                rendered = self.chat.render(messages, tools=list(tools) or None, add_generation_prompt=True)
            except DataError as error:  # some refuse calls, or several of them
                complaint = complaint or error
                continue
            at = rendered.marked.rfind(mark)
            if at >= 0:
                behind = rendered.part(at + len(mark))
                return behind.part(self._num_in_turn(behind.marked, messages, len(before), tools, mark))
        raise NotAppended(f"the chat template leaves the text of an assistant's turn out ({complaint})")

    def _num_in_turn(self, behind: str, messages: Sequence[Any], num: int, tools: Sequence[Any], mark: str) -> int:
        """Characters behind the word of a turn that belong to it still: its calls.

        The turn as the last one of a conversation tells: whatever its own end is, before it stand the same characters.
        """
        first = self.first_end(behind)
        if first is not None and not first[0]:
            return 0
        try:
            alone = self.chat.disarm(messages, list(tools) or None).render(num, asked=False).marked
        except DataError:
            alone = ""
        _, found, turn = alone.rpartition(mark)
        end = self.first_end(turn)
        turn = turn if end is None else turn[: end[0]]
        if found and behind.startswith(turn):
            return len(turn)
        return 0 if first is None else first[0]

    @staticmethod
    def _stand(message: Message, word: str, with_calls: bool) -> Message:
        """A message of the past: only its place matters, and a template that counts or pairs calls must find them."""
        kept = message.calls if with_calls else ()
        return replace(message, text=word, reasoning=None, calls=kept)

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
