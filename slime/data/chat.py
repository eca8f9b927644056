"""Renders and tokenizes chats without letting text from a dataset inject control tokens.

A user message that contains `<|im_end|>` must not end the turn, but templates paste strings verbatim and tokenizers
match control tokens anywhere. So each control string in a message is replaced by a harmless word, its stand-in, before
the template runs. When the result is tokenized, the control string is spelled out in ordinary tokens (requested
upstream in transformers issue 29279).

Invariants
1. Text without control strings is tokenized exactly as by `apply_chat_template(tokenize=True)`.
2. The ids of an injected control string contain no control id and decode to the original text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.core.errors import ConfigError, DataError

Message = Mapping[str, Any]


class TemplateRefusal(DataError):
    """The template raised an error for these messages."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation."""

    marked: str
    """The text with each injected control string replaced by its stand-in."""
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """Stand-in -> the control string in the data."""

    @property
    def text(self) -> str:
        """The text with the original control strings restored."""
        out = self.marked
        for stand_in, control in self.stand_ins.items():
            out = out.replace(stand_in, control)
        return out

    def part(self, start: int, stop: int | None = None) -> Rendered:
        return Rendered(self.marked[start:stop], self.stand_ins)


@dataclass(frozen=True, slots=True)
class Disarmed:
    """A conversation with stand-ins for its control strings, ready to be rendered."""

    chat: ChatRenderer
    messages: Sequence[Message]
    tools: Sequence[Any] | None
    stand_ins: Mapping[str, str]
    """See `Rendered`."""

    def render(self, length: int, *, add_prompt: bool) -> Rendered:
        """Renders the first `length` messages, optionally with a generation prompt. Raises `TemplateRefusal`."""
        return self.rendered(self.chat.write(self.messages[:length], self.tools, add_prompt=add_prompt))

    def rendered(self, marked: str) -> Rendered:
        """Wraps `marked`, a text from this conversation, together with the stand-ins."""
        return Rendered(marked, self.stand_ins)


class ChatRenderer:
    """Renders and tokenizes conversations with one tokenizer and one set of template arguments."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        kwargs: Mapping[str, Any] | None = None,
        end_ids: Collection[int] = (),
        media_ids: Collection[int] = (),
        allow_control_tokens: bool = False,
    ) -> None:
        """`end_ids`: stop tokens of the engines beyond the tokenizer's EOS (`slime.rollout.factories.end_of_text`).

        `media_ids`: placeholders of images and other media, which no message may spell, not even an assistant's.
        `allow_control_tokens`: encode control strings in the data as control ids. Raises `ConfigError` if the tokenizer
        has no chat template.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the checkpoint has no chat template (a base model?); use the chat checkpoint, set --chat-template "
                "FILE, or store rendered prompts in the dataset and drop --apply-chat-template"
            )
        self._tokenizer = tokenizer
        self._backend = _backend(tokenizer, "decode", "_decode")
        """Decodes without the checks of transformers, which take as long again."""
        self._encoder = _backend(tokenizer, "__call__", "_encode_plus")
        """Encodes likewise. Others may set its truncation or padding, which transformers resets for every text."""
        self._kwargs = dict(kwargs or {})
        by_id = tokenizer.added_tokens_decoder
        added = {str(token): token for token in by_id.values()}
        probe, turn = self._probe()
        self.ends: Mapping[str, int] = {str(by_id[i]): i for i in (*end_ids, tokenizer.eos_token_id) if i in by_id}
        """Text -> id of each token that ends a response. In some families, it is the token that opens the next turn."""
        own = {t for t in (tokenizer.bos_token, tokenizer.eos_token) if t is not None}
        self.structural = frozenset(t for t in added if t in probe) | own | set(self.ends)
        """Tokens that the template uses to delimit turns."""
        written = {t for t, token in added.items() if t in turn and not token.special}
        media = {str(by_id[i]) for i in media_ids if i in by_id}
        self._framing = self.structural - (written - own - set(self.ends)) | media
        """Tokens that assistant text must not produce. Others, such as `<think>`, are legitimate parts of a turn."""
        self.control = self.structural | media | {t for t, token in added.items() if token.special}
        """Tokens that text from a dataset must not produce. Assistant text may produce those not in `_framing`."""
        self.control_ids = frozenset(tokenizer.convert_tokens_to_ids(sorted(self.control)))
        self._allow = allow_control_tokens

    @property
    def template(self) -> str:
        return str(self._tokenizer.chat_template)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, add_generation_prompt: bool = True
    ) -> Rendered:
        """Renders messages. Raises `TemplateRefusal` with the template's error."""
        return self.disarm(messages, tools).render(len(messages), add_prompt=add_generation_prompt)

    def disarm(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Disarmed:
        """Replaces control strings with stand-ins, once for all renderings of the conversation."""
        stand_ins = {} if self._allow else self._stand_ins(messages, tools)
        return Disarmed(
            self,
            [self._replace(m, stand_ins, m.get("role") == "assistant") for m in messages],
            self._replace(list(tools), stand_ins, False) if tools else None,
            {word: control for control, word in stand_ins.items()},
        )

    def write(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, add_prompt: bool) -> str:
        """Runs the template on messages as they are. Raises `TemplateRefusal` with the template's error."""
        try:
            return self._apply(messages, tools=tools, add_generation_prompt=add_prompt)
        except Exception as error:  # a template is a program and can raise anything
            raise TemplateRefusal(f"the chat template rejects the messages: {type(error).__name__}: {error}") from error

    def encode(self, rendered: Rendered) -> list[int]:
        """Tokenizes a text. Raises `DataError` if an injected control string cannot be spelled without a control id."""
        ids: list[int] = []
        for _, text, control in self._parts(rendered):
            ids += self._encode_text(text) if control is None else self._spelled(control)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids, keeping control tokens. Never used to encode what was sampled again."""
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode_with_starts(self, rendered: Rendered) -> tuple[list[int], list[int]]:
        """Returns (ids as returned by `encode`, the offset in `marked` at which the text of each id starts)."""
        ids: list[int] = []
        starts: list[int] = []
        for at, text, control in self._parts(rendered):
            if control is not None:
                spelled = self._spelled(control)
                ids += spelled
                starts += [at] * len(spelled)
            elif text:
                more, offsets = self._encode_with_offsets(text)
                ids += more
                starts += [at + start for start, _ in offsets]
        return ids, starts

    def disarmed(self, text: str, rendered: Rendered) -> str:
        """Replaces control strings in `text` with the stand-ins of `rendered`."""
        for stand_in, control in rendered.stand_ins.items():
            text = text.replace(control, stand_in)
        return text

    def _parts(self, rendered: Rendered) -> Iterator[tuple[int, str, str | None]]:
        """Yields (offset in `marked`, text, control string or None for ordinary text) for each segment."""
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
            raise DataError(f"the text contains {control!r}, which this tokenizer can only encode as a control token")
        return spelled

    def _encode_with_offsets(self, text: str) -> tuple[list[int], Sequence[tuple[int, int]]]:
        backend = self._encoder
        plain = backend is not None and backend.truncation is None and backend.padding is None
        if plain and backend.encode_special_tokens == self._tokenizer.split_special_tokens:
            encoding = backend.encode(text, add_special_tokens=False)
            return encoding.ids, encoding.offsets
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return found["input_ids"], found["offset_mapping"]

    def _encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _apply(self, messages: Sequence[Message], *, tools: Any, add_generation_prompt: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **self._kwargs
        )
        return text

    def _probe(self) -> tuple[str, str]:
        """Renders a minimal conversation. Returns its text and the text of the assistant turn."""
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        try:
            whole = self._apply(messages, tools=None, add_generation_prompt=False)
            prompt, plain = (self._apply(messages[:1], tools=None, add_generation_prompt=a) for a in (True, False))
            answered = self._apply(messages[:2], tools=None, add_generation_prompt=False)
        except Exception:  # the template rejects it: fall back to the tokens marked as special
            return "", ""
        # If the generation prompt opens a thought (GLM-4.7), a response without a thought does not continue it.
        begins = next((text for text in (prompt, plain) if answered.startswith(text)), answered)
        return whole, answered[len(begins) :]

    def _stand_ins(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> dict[str, str]:
        """Maps each control string in the data to a word that does not occur there. Usually empty."""
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
                if not is_assistant or control in self._framing:
                    value = value.replace(control, word)
            return value
        if isinstance(value, Mapping):
            return {k: self._replace(v, stand_ins, is_assistant) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._replace(v, stand_ins, is_assistant) for v in value]
        return value


def _backend(tokenizer: Any, *names: str) -> Any:
    """Returns the `tokenizers` object behind a tokenizer; None if its class has its own form of one of two methods.

    `names`: of a method that every tokenizer has, and of the one by which it calls the `tokenizers` object.
    """
    kind, modules = type(tokenizer), ("tokenization_utils_base", "tokenization_utils_tokenizers")
    found = [getattr(getattr(kind, name, None), "__module__", "") for name in names]
    return tokenizer.backend_tokenizer if found == [f"transformers.{name}" for name in modules] else None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
