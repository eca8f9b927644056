"""Chat templates: messages to text and ids, without letting text from a dataset turn into control tokens.

A user text that contains `<|im_end|>` must not end the turn. But templates paste strings, and tokenizers read control
tokens anywhere in the text. So each control string in a message is replaced by a harmless word, its stand-in, before
the template runs, and is encoded as ordinary ids afterwards (transformers issue 29279 asks for this upstream).

Invariants
1. A text without control strings is encoded exactly as `apply_chat_template(tokenize=True)` encodes it.
2. The ids of an injected control string never contain a control id; decoding gives the original text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.core.errors import ConfigError, DataError

Message = Mapping[str, Any]


class TemplateRefusal(DataError):
    """The template raised an error on the messages."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text."""

    marked: str
    """The text with each injected control string replaced by its stand-in."""
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """Stand-in -> the control string that the data contains."""

    @property
    def text(self) -> str:
        """The original text."""
        out = self.marked
        for stand_in, control in self.stand_ins.items():
            out = out.replace(stand_in, control)
        return out

    def part(self, start: int, stop: int | None = None) -> Rendered:
        return Rendered(self.marked[start:stop], self.stand_ins)


@dataclass(frozen=True, slots=True)
class Disarmed:
    """The messages of a conversation with stand-ins for control strings, for one template."""

    chat: ChatRenderer
    messages: Sequence[Message]
    tools: Sequence[Any] | None
    stand_ins: Mapping[str, str]
    """See `Rendered`."""

    def render(self, length: int, *, asked: bool) -> Rendered:
        """Renders the first `length` messages. `asked`: with a generation prompt. Raises `TemplateRefusal`."""
        return self.rendered(self.chat.write(self.messages[:length], self.tools, asked=asked))

    def rendered(self, marked: str) -> Rendered:
        """Combines `marked`, a text of this conversation, with its stand-ins."""
        return Rendered(marked, self.stand_ins)


class ChatRenderer:
    """Renders and encodes with one tokenizer and one set of template arguments."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        kwargs: Mapping[str, Any] | None = None,
        end_ids: Collection[int] = (),
        allow_control_tokens: bool = False,
    ) -> None:
        """`end_ids`: tokens at which engines stop, besides the tokenizer's own (`slime.rollout.parts.end_of_text`).

        `allow_control_tokens`: control strings in the data become control ids. Raises `ConfigError` if the tokenizer
        has no chat template.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "got a tokenizer without a chat template, because the checkpoint has none (a base model?); give "
                "one as --chat-template FILE, use the chat checkpoint, or put rendered text into the dataset and drop "
                "--apply-chat-template"
            )
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        by_id = tokenizer.added_tokens_decoder
        added = {str(token): token for token in by_id.values()}
        probe, turn = self._probe()
        self.ends: Mapping[str, int] = {str(by_id[i]): i for i in (*end_ids, tokenizer.eos_token_id) if i in by_id}
        """Text -> id of tokens that end an answer; in some families they open the next turn."""
        own = {t for t in (tokenizer.bos_token, tokenizer.eos_token) if t is not None}
        self.structural = frozenset(t for t in added if t in probe) | own | set(self.ends)
        """Tokens that the template writes around turns."""
        written = {t for t, token in added.items() if t in turn and not token.special}
        self._held = self.structural - (written - own - set(self.ends))
        """Tokens that an assistant's text must not produce. Other tokens, such as `<think>`, belong to its turn."""
        self.control = self.structural | {t for t, token in added.items() if token.special}
        """Tokens that no text of a dataset may produce, except for the assistant's own within its turn."""
        self.control_ids = frozenset(tokenizer.convert_tokens_to_ids(sorted(self.control)))
        self._allow = allow_control_tokens

    @property
    def template(self) -> str:
        return str(self._tokenizer.chat_template)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, add_generation_prompt: bool = True
    ) -> Rendered:
        """Messages to text. Raises `TemplateRefusal` with the template's complaint."""
        return self.disarm(messages, tools).render(len(messages), asked=add_generation_prompt)

    def disarm(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Disarmed:
        """Replaces control strings by stand-ins, so that the conversation can be rendered in parts."""
        stand_ins = {} if self._allow else self._stand_ins(messages, tools)
        return Disarmed(
            self,
            [self._replace(m, stand_ins, m.get("role") == "assistant") for m in messages],
            self._replace(list(tools), stand_ins, False) if tools else None,
            {word: control for control, word in stand_ins.items()},
        )

    def write(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, asked: bool) -> str:
        """Runs the template on the messages unchanged. Raises `TemplateRefusal` with its complaint."""
        try:
            return self._apply(messages, tools=tools, add_generation_prompt=asked)
        except Exception as error:  # a template is a program by the checkpoint's author
            raise TemplateRefusal(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

    def encode(self, rendered: Rendered) -> list[int]:
        """Text to ids. Raises `DataError` if an injected control string cannot be encoded without a control id."""
        ids: list[int] = []
        for _, text, control in self._parts(rendered):
            ids += self._encode_text(text) if control is None else self._spelled(control)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, control tokens included; for checks and messages only."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode_with_starts(self, rendered: Rendered) -> tuple[list[int], list[int]]:
        """The ids as in `encode`, and for each id the start of its text in `marked`."""
        ids: list[int] = []
        starts: list[int] = []
        for at, text, control in self._parts(rendered):
            if control is not None:
                spelled = self._spelled(control)
                ids += spelled
                starts += [at] * len(spelled)
            elif text:
                encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
                ids += encoded["input_ids"]
                starts += [at + start for start, _ in encoded["offset_mapping"]]
        return ids, starts

    def disarmed(self, text: str, rendered: Rendered) -> str:
        """A text as it appears in `rendered.marked`."""
        for stand_in, control in rendered.stand_ins.items():
            text = text.replace(control, stand_in)
        return text

    def _parts(self, rendered: Rendered) -> Iterator[tuple[int, str, str | None]]:
        """Yields each part as (position in `marked`, text, the control string that it stands for)."""
        if not rendered.stand_ins:
            yield 0, rendered.marked, None
            return
        at = 0
        for part in re.split("(" + "|".join(map(re.escape, rendered.stand_ins)) + ")", rendered.marked):
            yield at, part, rendered.stand_ins.get(part)
            at += len(part)

    def _spelled(self, control: str) -> list[int]:
        spelled = self._encode_text(control[:1]) + self._encode_text(control[1:])
        if self.control_ids & set(spelled):
            raise DataError(f"the text contains the control token {control!r}, which cannot be spelled out")
        return spelled

    def _encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _apply(self, messages: Sequence[Message], *, tools: Any, add_generation_prompt: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **self._kwargs
        )
        return text

    def _probe(self) -> tuple[str, str]:
        """A plain conversation as the template writes it, and the assistant's part of it."""
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        try:
            whole = self._apply(messages, tools=None, add_generation_prompt=False)
            asked, plain = (self._apply(messages[:1], tools=None, add_generation_prompt=a) for a in (True, False))
            answered = self._apply(messages[:2], tools=None, add_generation_prompt=False)
        except Exception:  # without this conversation, only tokens marked as special count
            return "", ""
        # A prompt that begins a thought (GLM-4.7) does not match an answer without one.
        begins = next((text for text in (asked, plain) if answered.startswith(text)), answered)
        return whole, answered[len(begins) :]

    def _stand_ins(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> dict[str, str]:
        """Control string in the data -> a word that does not occur in the data; usually empty."""
        everything = "\n".join(_strings([messages, tools]))
        found = [c for c in self.control if c in everything]
        tag = "standin"
        while found and tag in everything:
            tag += "q"
        # Longest first: one control string may contain another.
        return {c: f"x{tag}x{i}x" for i, c in enumerate(sorted(found, key=lambda c: (-len(c), c)))}

    def _replace(self, value: Any, stand_ins: Mapping[str, str], is_assistant: bool) -> Any:
        if not stand_ins:
            return value
        if isinstance(value, str):
            for control, word in stand_ins.items():
                if not is_assistant or control in self._held:
                    value = value.replace(control, word)
            return value
        if isinstance(value, Mapping):
            return {k: self._replace(v, stand_ins, is_assistant) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._replace(v, stand_ins, is_assistant) for v in value]
        return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
