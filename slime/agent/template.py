"""Conversations as token ids: the first prompt, and the tokens between a sampled turn and the next one.

A chat template writes text. Re-encoding the model's text may not reproduce the sampled ids, and templates drop
thinking, trim text and reorder messages. So assistant messages are never encoded. To find what follows a sampled turn,
the entire conversation is rendered with a placeholder for each answer. The suffix is the text after the last
placeholder, starting at the token that ends that turn. The next prompt is the existing tokens plus the suffix.

The token that ends a turn depends on what follows: GLM's templates write only the header of the next message there, and
gpt-oss ends the last turn with a different token. A model may sample any of its end tokens, so its end token may differ
from the template's. In that case, the prompt drops the model's end token, and the suffix follows the tokens before it
(`Suffix`).

Invariants
1. A suffix begins at a control token, where every tokenizer splits, so encoding it separately produces the same ids.
2. Control tokens in messages are spelled out (`ChatRenderer`); control tokens in a suffix come from the template.
3. A suffix contains every new message, in order. If a template moves or omits one, `NotAppended` is raised.
4. From the end of the turn onwards, tokens plus suffix equal the template's output, without an extra end token.
5. What a template writes after the last turn does not depend on the middle of a long conversation. So the middle is
   left out (`_without_middle`): its text is a placeholder anyway, and rendering a thousand messages takes longer than
   anything else in a turn. Each session checks this again whenever its number of answers has doubled, by rendering all
   messages. If a template breaks it, all messages are rendered from then on.
6. Each image of a message has its placeholders in the tokens, one for each of its tokens. A template that does not
   write one placeholder for each image is an error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slime.agent.messages import Message, Picture
from slime.core.errors import ConfigError, DataError
from slime.core.files import ImageFolder
from slime.core.hf_config import other_media_ids, read_hf_config
from slime.data.chat import ChatRenderer, Rendered
from slime.data.images import ConversationImages
from slime.models import family_of
from slime.rollout.factories import end_of_text
from slime.settings import Args
from slime.settings.schema import images_problem_of

logger = logging.getLogger(__name__)

NO_TOOLS = (
    "the chat template does not support tools, so the model would not see them; set a template that does with "
    "--chat-template FILE"
)


class Origin(str, Enum):
    SAMPLED = "sampled"
    TEMPLATE = "template"
    SYSTEM = "system"
    USER = "user"
    TOOL = "tool"
    ASSISTANT = "assistant"
    """Text in an assistant message that was not sampled in this session, such as an example or a summary."""


ORIGINS = tuple(Origin)
CODES = {origin: code for code, origin in enumerate(ORIGINS)}
"""Origin -> its number in `ORIGINS`, as which columns store it."""


class Placed(NamedTuple):
    """An image in a sequence of tokens."""

    start: int
    """Position of its first placeholder."""
    num: int
    """Number of its placeholders."""
    digest: str


@dataclass(frozen=True, slots=True)
class Tokens:
    ids: tuple[int, ...]
    codes: npt.NDArray[np.uint8]
    """[T] origin of each token, as a number of `CODES`."""
    images: tuple[Placed, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.codes), (len(self.ids), len(self.codes))

    def after_first(self) -> Tokens:
        """Returns the tokens without the first one, which must not be a placeholder."""
        images = tuple(image._replace(start=image.start - 1) for image in self.images)
        return Tokens(self.ids[1:], self.codes[1:], images)


@dataclass(frozen=True, slots=True)
class Suffix(Tokens):
    """The tokens that follow a sampled turn."""

    other_end: bool = False
    """Whether the model ended the turn with a different end token than the template's. If so, the suffix begins with
    the template's, which replaces the last sampled token in the prompt.
    """


class NotAppended(DataError):
    """The template does not render the longer conversation as the earlier text plus new text."""


TEXT_ONLY = "the model is text-only"


class ConversationTemplate:
    def __init__(
        self,
        chat: ChatRenderer,
        end_ids: Sequence[int],
        images: ConversationImages | None = None,
        why_no_images: str = TEXT_ONLY,
    ) -> None:
        """`end_ids`: all tokens that end a turn; in some families, these include the header of the next message.
        `images`: reads images; None if messages can have none, for the reason `why_no_images`.

        Raises `DataError` if `end_ids` is empty.
        """
        if not end_ids:
            raise DataError("the checkpoint defines no end token; set eos_token_id in its generation_config.json")
        self.chat, self.end_ids, self.images, self.why_no_images = chat, frozenset(end_ids), images, why_no_images
        self._ends = sorted({chat.decode([i]) for i in end_ids}, key=len, reverse=True)
        self._needs_all = False
        """Whether the template is known to break invariant 5."""

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the template writes tools into the prompt. Some, such as DeepSeek-V3's, do not."""
        tool = {"name": "probe_of_tools", "description": "", "parameters": {"type": "object", "properties": {}}}
        asked = [{"role": "user", "content": "?"}]
        try:
            return "probe_of_tools" in self.chat.render(asked, tools=[{"type": "function", "function": tool}]).marked
        except DataError:
            return False

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Tokens:
        """Returns the tokens of the entire conversation, up to the model's turn.

        Raises `DataError` with the template's error message, or if there are tools that it does not support.
        """
        if tools and not self.writes_tools:
            raise DataError(NO_TOOLS)
        rendered = self.chat.render([m.for_template() for m in messages], tools=list(tools) or None)
        return self._tokens(rendered, messages, in_order=False)

    def suffix(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Any] = (), *, last_id: int | None
    ) -> Suffix:
        """Returns the tokens after a sampled turn, up to the model's next turn.

        `before`: messages up to and including the sampled turn. `new`: messages after it. `last_id`: last sampled
        token, or None. Raises `NotAppended`.
        """
        assert before and before[-1].role == "assistant", "a suffix must follow a sampled turn"
        assert all(m.role != "assistant" for m in new), "assistant messages must not be encoded"
        rendered = self._behind(before, new, tools)
        tokens = self._tokens(rendered, new, in_order=True)
        end = self.chat.decode(tokens.ids[:1])
        if not end or not rendered.marked.startswith(end) or not self.chat.control_ids.issuperset(tokens.ids[:1]):
            raise NotAppended(
                f"the chat template writes {rendered.marked[:40]!r} after an assistant's turn, which does not begin "
                "with a control token, so the end of the turn cannot be determined"
            )
        if last_id == tokens.ids[0]:
            rest = tokens.after_first()
            return Suffix(rest.ids, rest.codes, rest.images)
        return Suffix(tokens.ids, tokens.codes, tokens.images, other_end=last_id in self.end_ids)

    def can_follow(self, sampled: npt.NDArray[np.int32]) -> bool:
        """Returns whether a prompt with images may contain these sampled tokens. An engine would read a placeholder
        that the model sampled as an image (`Pictures.can_follow`).
        """
        placeholders = [] if self.images is None else [self.images.token_id, *self.images.other_ids]
        return not np.isin(sampled, placeholders).any()

    def first_end(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """Returns (position, token) of the first end token at or after `start`; None if there is none."""
        found = [(text.find(token, start), token) for token in self._ends]
        return min(((at, token) for at, token in found if at >= 0), default=None)

    def _behind(self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Any]) -> Rendered:
        """Returns the template's text after the last answer, starting at the end of its turn (invariant 5)."""
        short = [] if self._needs_all else _without_middle(before)
        if short and self._numbers_images and any(m.images for m in before):
            short = []
        if not short:
            return self._behind_all(before, new, tools)
        try:
            found = self._behind_all(short, new, tools)
        except DataError:
            return self._behind_all(before, new, tools)
        if _is_power_of_two(sum(m.role == "assistant" for m in before)):
            whole = self._behind_all(before, new, tools)
            if whole.text != found.text:
                self._needs_all = True
                logger.warning(
                    "the chat template writes something else after a long conversation than after a short one, so all "
                    "messages are rendered for every turn of a long conversation"
                )
            return whole
        return found

    def _behind_all(self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Any]) -> Rendered:
        """Like `_behind`, but renders all messages."""
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
            except DataError as error:  # some templates reject calls, or several in one turn
                complaint = complaint or error
                continue
            at = rendered.marked.rfind(mark)
            if at >= 0:
                behind = rendered.part(at + len(mark))
                return behind.part(self._num_in_turn(behind.marked, messages, len(before), tools, mark))
        raise NotAppended(f"the chat template omits the text of an assistant message ({complaint})")

    def _num_in_turn(self, behind: str, messages: Sequence[Any], num: int, tools: Sequence[Any], mark: str) -> int:
        """Returns how many characters after a turn's placeholder still belong to the turn, such as its calls.

        Finds the turn's end by rendering the conversation only up to that turn, where its text is the same.
        """
        first = self.first_end(behind)
        if first is not None and not first[0]:
            return 0
        try:
            alone = self.chat.disarm(messages, list(tools) or None).render(num, add_prompt=False).marked
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
        """Returns a placeholder for a past message. `with_calls`: for templates that count or pair calls."""
        kept, images = message.calls if with_calls else (), tuple(replace(one, at=0) for one in message.images)
        return replace(message, text=word, reasoning=None, calls=kept, images=images)

    @cached_property
    def _numbers_images(self) -> bool:
        """Whether the template writes an image otherwise after another image, such as with a number."""
        image, word = {"role": "user", "content": [{"type": "image"}]}, "xanswerx"
        answer = {"role": "assistant", "content": word}
        try:
            whole = [self.chat.render([first, answer, image]).marked for first in (image, {**image, "content": "?"})]
        except DataError:
            return True
        return len({text.rpartition(word)[2] for text in whole}) > 1

    def _tokens(self, rendered: Rendered, messages: Sequence[Message], *, in_order: bool) -> Tokens:
        """Encodes the text and finds the origin of each token. Raises `NotAppended` if a message is missing."""
        spans: list[tuple[int, int, Origin]] = []
        at = 0
        for message, part in ((one, part) for one in messages for part in one.texts()):
            text = self.chat.disarmed(part, rendered).strip()
            if not text:
                continue
            place = _place(rendered.marked, text, at if in_order else 0)
            if place is None and in_order:
                raise NotAppended(f"the chat template does not append the {message.role} message {text[:80]!r}")
            if place is not None:
                spans.append((*place, Origin(message.role)))
                at = place[1] if in_order else at
        ids, starts = self.chat.encode_with_starts(rendered)
        codes = _codes(starts, sorted(spans))
        images = [(image, Origin(message.role)) for message in messages for image in message.images]
        if not images:
            return Tokens(tuple(ids), codes)
        return self._with_images(np.asarray(ids, np.int32), codes, images)

    def _with_images(
        self, ids: npt.NDArray[np.int32], codes: npt.NDArray[np.uint8], images: Sequence[tuple[Picture, Origin]]
    ) -> Tokens:
        """Repeats the placeholder of each image once per image token, as the engine does. `ids`, `codes`: [T].

        Raises `NotAppended` if there is not one placeholder per image.
        """
        assert self.images is not None, "messages without a reader of images must have none"
        places = np.flatnonzero(ids == self.images.token_id)
        if len(places) != len(images):
            raise NotAppended(
                f"the chat template writes {len(places)} placeholders for {len(images)} images; it may leave out the "
                "images of some roles, so send them in a user message"
            )
        repeats = np.ones(len(ids), np.int64)
        repeats[places] = [image.num_tokens for image, _ in images]
        # An image splits a text into parts, which may be so short that they are found in a control token.
        codes[np.isin(ids, sorted(self.chat.control_ids))] = CODES[Origin.TEMPLATE]
        codes[places] = [CODES[origin] for _, origin in images]
        starts = (np.cumsum(repeats) - repeats)[places].tolist()
        return Tokens(
            tuple(np.repeat(ids, repeats).tolist()),
            np.repeat(codes, repeats),
            tuple(Placed(start, one.num_tokens, one.digest) for start, (one, _) in zip(starts, images, strict=True)),
        )


def template_of(args: Args, checkpoint: str, tokenizer: Any, kwargs: Mapping[str, Any]) -> ConversationTemplate:
    """Returns a checkpoint's chat template for conversations, with its processor of images if it reads any. `kwargs`:
    the template's arguments. Raises `ConfigError` if there is none.
    """
    ends, images, media = sorted(end_of_text(checkpoint, tokenizer).token_ids), None, frozenset[int]()
    why = _why_no_images(args, checkpoint)
    if not why:
        config = read_hf_config(checkpoint)
        processor, others = family_of(config).images(config, Path(checkpoint)), other_media_ids(config)
        images = ConversationImages(processor, ImageFolder.of_run(args.run_dir), others)
        media = others | {processor.token_id}
    return ConversationTemplate(ChatRenderer(tokenizer, kwargs=kwargs, media_ids=media), ends, images, why)


def _why_no_images(args: Args, checkpoint: str) -> str:
    """Returns why a model of the run gets no images; empty if it does."""
    is_policy = checkpoint == args.hf_checkpoint
    try:
        if images_problem_of(checkpoint) is not None:
            return TEXT_ONLY
    except ConfigError:
        if is_policy:
            raise
        return "slime does not know how this model reads images"
    return "this run has no images; set --multimodal-keys" if is_policy and args.multimodal_keys is None else ""


def _place(written: str, text: str, start: int) -> tuple[int, int] | None:
    """Returns (start, end) of a text in what a template wrote from `start` onwards; None if it is not there.

    Some templates write messages as JSON strings: Llama 3.1's and gpt-oss' the results of tools.
    """
    at = written.find(text, start)
    if at < 0:
        text = json.dumps(text, ensure_ascii=False)[1:-1]
        at = written.find(text, start)
    return None if at < 0 else (at, at + len(text))


KEPT = 16
"""How many messages of a long conversation are rendered, at least, besides its beginning."""


def _without_middle(messages: Sequence[Message]) -> list[Message]:
    """Leaves out a middle that begins with an answer and is followed by one, so that roles still alternate, and each
    tool result follows its call. Returns an empty list if there is little to leave out.
    """
    if len(messages) < 3 * KEPT:
        return []
    answers = (i for i, message in enumerate(messages) if message.role == "assistant")
    first = next(answers, len(messages))
    last = next((i for i in range(len(messages) - KEPT, first, -1) if messages[i].role == "assistant"), first)
    return [*messages[:first], *messages[last:]] if last - first > KEPT else []


def _is_power_of_two(num: int) -> bool:
    return num & (num - 1) == 0


def _codes(starts: Sequence[int], spans: Sequence[tuple[int, int, Origin]]) -> npt.NDArray[np.uint8]:
    """Returns the [T] origins. `starts`: position of each token's first character. `spans`: sorted, non-overlapping."""
    places = np.asarray(starts, np.int64)
    begins, ends = (np.array([span[i] for span in spans] + [len_], np.int64) for i, len_ in ((0, _NEVER), (1, _NEVER)))
    kinds = np.array([*(CODES[kind] for _, _, kind in spans), CODES[Origin.TEMPLATE]], np.uint8)
    which = np.searchsorted(ends, places, side="right")
    codes: npt.NDArray[np.uint8] = np.where(begins[which] <= places, kinds[which], CODES[Origin.TEMPLATE])
    return codes.astype(np.uint8)


_NEVER = np.iinfo(np.int64).max
