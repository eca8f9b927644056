"""Supervised fine-tuning: a conversation to ids and a loss mask, proven from the chat template by rendering prefixes.

What the model would write in a turn begins behind the conversation up to that turn with its generation prompt, and ends
with the first token at which an engine stops: what the template writes behind it (a newline, the end of the text) no
model samples. In some families (GLM) that token opens the next turn. This is only right if the conversation up to the
turn, with its generation prompt, and the turn itself stand in the whole as they stand alone: a template that rewrites
history (Qwen3 drops earlier reasoning) is caught and shown, never masked by guess.

Invariants
1. A trained position is one that the model itself would have sampled after exactly the ids before it.
2. Every trained turn says all that its message says, and its last id, and no other, is one at which an engine stops.
3. Ids after the last trained token and before the first are context or absent; the loss mask starts and ends with 1.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.core.errors import DataError
from slime.data.chat import ChatRenderer, Rendered, TemplateRefusal
from slime.data.said import functions, unsaid, with_decoded_arguments, with_encoded_arguments

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

    A turn ends at a token of `chat.ends`. Raises `DataError` if no message is trained, if the template refuses the
    messages, writes no generation prompt where it is asked for one or no end behind a trained turn, if it is not
    prefix-stable at a trained message, with the counter-example, or if it leaves out what a trained message says.
    """
    trained = [i for i, m in enumerate(messages) if m.get("role") == "assistant" and int(m.get(STEP_MASK_KEY, 1)) != 0]
    if not trained:
        raise DataError(f"got no trained assistant message in {len(messages)}; nothing would be learned from this row")
    if trained[0] == 0:
        raise DataError("got a conversation that starts with a trained assistant message; it needs a prompt before it")
    if problem := _generation_prompt_problem(chat):
        raise DataError(problem)
    clean = [{k: v for k, v in m.items() if k != STEP_MASK_KEY} for m in messages]
    decoded, encoded = with_decoded_arguments(clean), with_encoded_arguments(clean)
    if decoded == encoded:
        return _Conversation(decoded, chat, tools).tokens(trained)
    try:
        return _Conversation(decoded, chat, tools).tokens(trained)
    except DataError as first:
        # Some templates (DeepSeek-V3) paste arguments: they refuse objects, or write them as Python does.
        try:
            return _Conversation(encoded, chat, tools).tokens(trained)
        except DataError as second:
            raise (second if isinstance(first, TemplateRefusal) else first) from None


class _Conversation:
    """One conversation in the spelling that the template gets."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], chat: ChatRenderer, tools: Sequence[Any] | None) -> None:
        self._messages, self._chat, self._tools = messages, chat, tools
        self._whole = chat.render(messages, tools=tools, add_generation_prompt=False)

    def tokens(self, trained: Sequence[int]) -> SftTokens:
        """`sft_tokens` of the messages with these numbers."""
        # Bounds in `marked`: context up to the first, trained up to the second, context up to the third, and so on.
        bounds = [0]
        for i in trained:
            start, stop = self._turn(i)
            if not bounds[-1] <= start < stop:
                raise DataError(f"the chat template gives message {i} no text of its own after its generation prompt")
            bounds += [start, stop]
        parts: list[list[int]] = []
        for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
            part = self._whole.part(start, stop)
            parts.append(self._answer(part) if number % 2 else self._context(part, parts[-1][-1:] if parts else []))
        _require_faithful(parts, self._whole.part(0, bounds[-1]), self._chat)
        tokens = [token for part in parts for token in part]
        mask = [i % 2 for i, part in enumerate(parts) for _ in part]
        return SftTokens(tuple(tokens), tuple(mask[len(parts[0]) :]))

    def _turn(self, number: int) -> tuple[int, int]:
        """Where in `marked` the model's part of a message begins and ends. Raises `DataError`."""
        prompt, alone = (
            self._chat.render_prefix(self._messages, length, tools=self._tools, add_generation_prompt=asked)
            for length, asked in ((number, True), (number + 1, False))
        )
        if not self._whole.marked.startswith(prompt.marked):
            plain = self._chat.render_prefix(self._messages, number, tools=self._tools, add_generation_prompt=False)
            _require_prefix(plain, self._whole, number)
            raise DataError(_unprompted(number, prompt, plain, self._whole))
        start = len(prompt.marked)
        found = _first_end(self._whole.marked, start, self._chat)
        if found is None or found[0] > len(alone.marked):
            _require_prefix(alone, self._whole, number)
            raise DataError(_endless(number, alone.part(start).text, self._chat))
        stop = sum(found)
        _require_prefix(alone.part(0, stop), self._whole, number)
        _require_said(self._messages[number], self._tools, self._whole.part(start, stop).text, self._whole.text, number)
        return start, stop

    def _answer(self, part: Rendered) -> list[int]:
        ids = self._chat.encode(part)
        own = set(self._chat.ends.values())
        if ids[-1] not in own or own & set(ids[:-1]):
            raise DataError(
                f"the ids of the turn {part.text[:200]!r} hold a token at which engines stop elsewhere than at their "
                f"end ({', '.join(self._chat.ends)}); do: leave this row out"
            )
        return ids

    def _context(self, part: Rendered, end: Sequence[int]) -> list[int]:
        """The ids behind an end token are those of a prompt, in which that token stands: some take a newline along."""
        token = next((text for text, own in self._chat.ends.items() if [own] == list(end)), "")
        ids = self._chat.encode(Rendered(token + part.marked, part.stand_ins))
        return ids[1:] if token and ids[:1] == list(end) else self._chat.encode(part)


def _first_end(marked: str, start: int, chat: ChatRenderer) -> tuple[int, int] | None:
    """(place, length) of the first token at which an engine stops. Those of the data are not among them."""
    found = [(marked.find(end, start), len(end)) for end in chat.ends]
    return min((one for one in found if one[0] >= 0), key=lambda one: (one[0], -one[1]), default=None)


def _unprompted(number: int, prompt: Rendered, plain: Rendered, whole: Rendered) -> str:
    at = len(plain.marked)
    return (
        f"the chat template asks for message {number} with {prompt.part(at).text!r}, and then writes the message as "
        f"{whole.part(at, at + 80).text!r}, so the model would learn an answer to another prompt than it gets; do: put "
        "what the prompt begins (a thought) into the message as the template reads it, or give --chat-template FILE, "
        "or --apply-chat-template-kwargs"
    )


def _endless(number: int, turn: str, chat: ChatRenderer) -> str:
    return (
        f"the chat template writes no token at which engines stop ({', '.join(chat.ends) or 'none is known'}) right "
        f"behind message {number}, whose turn ends with {turn[-60:]!r}, so the model would not learn to stop; do: if "
        "the next turn's first token ends an answer (GLM), end the conversation with a message of the user (of it "
        f'nothing is kept but that token) or set "{STEP_MASK_KEY}": 0 on its last answer; else name the token that '
        "ends a turn in eos_token_id of the checkpoint's generation_config.json"
    )


@functools.lru_cache(maxsize=8)
def _generation_prompt_problem(chat: ChatRenderer) -> str | None:
    return generation_prompt_problem(lambda m, asked: chat.render(m, add_generation_prompt=asked).marked)


def generation_prompt_problem(render: Callable[[list[dict[str, Any]], bool], str | None]) -> str | None:
    """Why a template's masks cannot be right that ignores `add_generation_prompt`; None if they can.

    They can if an answer has no header, as in Mistral's. `render`: messages, and whether a generation prompt is asked
    for, to text; None where that is not known.
    """
    asked: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    answered = [*asked, {"role": "assistant", "content": "b"}]
    try:
        prompt, plain = render(asked, True), render(asked, False)
        turn, further = render(answered, False), render([*answered, *asked], False)
    except DataError:  # of a template that wants other conversations: the row itself shows what it does with it
        return None
    if prompt != plain or prompt is None or turn is None or further is None:
        return None
    if further.startswith(turn) and turn.startswith(prompt) and turn[len(prompt) :].lstrip().startswith("b"):
        return None
    return (
        f"got a chat template on which add_generation_prompt changes nothing: it writes {prompt[-60:]!r} behind a "
        f"question and {turn[-60:]!r} behind an answer, so nothing says where an answer begins; do: use one that "
        "writes a generation prompt where it is asked to (--chat-template FILE)"
    )


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
    """What the message says, reasoning and calls included, is in the turn, and the tools in the conversation."""
    missing = unsaid(message, turn)
    missing += [f"tool {name}" for name in (str(f.get("name", "")) for f in functions(tools)) if name not in whole]
    if missing:
        raise DataError(
            f"the chat template leaves out {', '.join(missing)} of message {number}, whose turn reads {turn[:200]!r}; "
            "do: use a template that knows tools and reasoning, or write messages as it wants them (some: content null "
            "beside calls, reasoning within <think> tags of the content)"
        )


def _require_faithful(parts: Sequence[Sequence[int]], text: Rendered, chat: ChatRenderer) -> None:
    """Parts are encoded apart, as the prompt is in generation; where that differs from the whole it must decode."""
    joined = [token for part in parts for token in part]
    if joined != chat.encode(text) and chat.decode(joined) != text.text:
        raise DataError(
            f"the ids of prompt and turns, put together, decode to {chat.decode(joined)[:200]!r} and not to "
            f"{text.text[:200]!r}, because this tokenizer encodes a text differently when split; leave this row out"
        )
