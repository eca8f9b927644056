"""Supervised fine-tuning: converts a conversation into samples with the same prompts as at inference.

The prompt of a turn is what the template renders for the preceding messages plus the generation prompt. The turn is the
text that the template writes after that, up to the first stop token of the engine, which in some families (GLM) is the
token that opens the next turn. If the template only appends, all turns of a conversation go into one sample. If it
rewrites history (Qwen3 drops earlier thoughts), the turn gets its own sample, with the history as the model would see
it. All samples of a row share one execution, so they count as one row in the loss (`slime.algorithms.aggregation`).

Invariants
1. The ids before a trained token are exactly the context in which the model would sample it: the prompt of the turn and
   the turn so far.
2. Each trained turn of a row is trained once and contains everything that the template writes for its message
   (`slime.data.template_spelling`). Its last id is a stop token of the engine, and no other id is.
3. The response of a sample starts and ends with a trained id.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.core.errors import DataError
from slime.data.chat import ChatRenderer, Disarmed
from slime.data.template_spelling import (
    QUESTION,
    REASONING,
    REASONING_KEYS,
    THOUGHT_BEGINS,
    TOOLS,
    Spelled,
    Spelling,
    is_trained,
    omitted_message,
    thought_of,
    unsaid,
    writes_tools,
)

Message = Mapping[str, Any]
ANSWER_KEYS = ("content", "tool_calls", "function_call", *REASONING_KEYS)
"""The parts of an assistant message. At least one trained message must have at least one of these."""
_THOUGHT = re.compile(r"(?:<think>(.*?))?</think>\s*", re.DOTALL)
"""A thought, or the rest of one, at the start of a turn."""


@dataclass(frozen=True, slots=True)
class SftTokens:
    """One training sample of T ids. The last R ids are the response, which starts at the first trained id."""

    tokens: tuple[int, ...]
    """[T] ids up to the last trained one."""
    loss_mask: tuple[int, ...]
    """[R] 1 for trained tokens, 0 between trained turns."""

    @property
    def response_length(self) -> int:
        return len(self.loss_mask)


@dataclass(frozen=True, slots=True)
class SftRow:
    samples: tuple[SftTokens, ...]
    left_out: frozenset[str]
    """The kinds of content that the template leaves out."""


@dataclass(frozen=True, slots=True)
class _Turn:
    prompt: str
    """Contains stand-ins, like `text` (see `Rendered.marked`)."""
    text: str
    """Includes the end token."""
    is_thoughtless: bool
    """Whether the template omits the message's thought."""


def conversation_of(prompt: Any, label: Any, *, rendered: bool = False) -> list[Any] | None:
    """Returns the messages of a row: its prompt, or a user message (text prompt) and an assistant message (text label).

    Returns None for any other row, and for a text prompt that is already `rendered`.
    """
    if isinstance(prompt, str) and isinstance(label, str) and prompt and label and not rendered:
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": label}]
    return prompt if isinstance(prompt, list) else None


def trained_turns(messages: Sequence[Message]) -> list[int]:
    """Returns the indices of the messages to train on. Leading assistant messages answer nothing, so they are context.

    Raises `DataError` if there are none, or if all of them are empty.
    """
    first = next((i for i, m in enumerate(messages) if m.get("role") != "assistant"), len(messages))
    found = [i for i, m in enumerate(messages) if is_trained(m) and i > first]
    if not found:
        raise DataError(
            f"none of the {len(messages)} messages can be trained; add an assistant message that follows a message of "
            "another role and has no mask of 0, or remove this row"
        )
    if not any(str(messages[i].get(key) or "").strip() for i in found for key in ANSWER_KEYS):
        raise DataError(
            f"message {found[0]} (role assistant) is empty and nothing else would be trained, which would teach the "
            "model to say nothing; remove this row"
        )
    return found


def sft_row(messages: Sequence[Message], chat: ChatRenderer, *, tools: Sequence[Any] | None = None) -> SftRow:
    """Converts a conversation to ids and masks. Every assistant message is trained on
    unless its mask is 0 (`MASK_KEYS`).

    A turn ends at a token of `chat.ends`. Raises `DataError` if no message can be trained, or if the template rejects
    the messages, omits part of a message, writes no generation prompt, writes no end after a trained turn, or writes a
    turn that does not continue its prompt.
    """
    trained = set(trained_turns(messages))
    if problem := _generation_prompt_problem(chat):
        raise DataError(problem)
    spelled = _spelling_of(chat).spell(messages, tools)
    conversation = _Conversation(spelled, chat)
    numbers = [i for i, row in enumerate(spelled.rows) if row in trained and spelled.messages[i]["role"] == "assistant"]
    turns = [conversation.turn(i) for i in numbers]
    conversation.require_context(numbers[-1], turns[-1].prompt)
    left_out = {what for i in numbers for what in spelled.left_out[i]} | {REASONING for t in turns if t.is_thoughtless}
    left_out |= set() if writes_tools(tools, turns[0].prompt) else {TOOLS}
    return SftRow(tuple(conversation.samples(turns)), frozenset(left_out))


class _Conversation:
    def __init__(self, spelled: Spelled, chat: ChatRenderer) -> None:
        self._rows, self._chat = spelled.rows, chat
        self._talk: Disarmed = chat.disarm(spelled.messages, spelled.tools)
        self._messages = self._talk.messages

    def turn(self, number: int) -> _Turn:
        """Renders the prompt and the turn of a message, as the model would see and write them. Raises `DataError`."""
        prompt = self._write(self._messages[:number], add_prompt=True)
        body = self._body(self._messages[: number + 1], prompt)
        if body is None:
            # Some templates render a message differently in context: gpt-oss drops thoughts before an answer, and
            # DeepSeek-V3 omits the header of a second call. So render the message again, right after a question.
            fresh = self._write([QUESTION], add_prompt=True)
            header = fresh[len(self._write([QUESTION], add_prompt=False)) :]
            if prompt.endswith(header) or prompt == self._write(self._messages[:number], add_prompt=False):
                thinks = THOUGHT_BEGINS.search(prompt) is not None
                body = self._body([QUESTION, self._messages[number]], fresh, thinks=thinks)
        if body is None:
            raise DataError(self._unprompted(number, prompt))
        text = self._ended(number, body)
        missing = unsaid(self._messages[number], text)
        # DeepSeek-R1's generation prompt opens a thought after a question, but not after a tool result.
        no_thought = _spelling_of(self._chat).thought_key is None and THOUGHT_BEGINS.search(prompt) is None
        if missing == [REASONING] and no_thought:
            return _Turn(prompt, text, is_thoughtless=True)
        if missing:
            has_no_calls = missing[-1].startswith("tool call") and _spelling_of(self._chat).calls is None
            is_ready = has_no_calls and "<|im_start|>" in self._plain(prompt)
            ready = "; examples/tools.jinja of slime is one, see docs/fine_tuning.md" if is_ready else ""
            raise DataError(
                f"the chat template omits {', '.join(missing)} of message {self._rows[number]}, which it renders as "
                f"{self._plain(text)[:200]!r}; use a template that writes it (--chat-template FILE{ready}), or store "
                "the message in the format that this template reads (for example, reasoning in <think> tags)"
            )
        return _Turn(prompt, text, is_thoughtless=False)

    def samples(self, turns: Sequence[_Turn]) -> Iterator[SftTokens]:
        """Joins consecutive turns into one sample as long as each prompt continues the previous turn."""
        runs: list[list[_Turn]] = []
        for turn in turns:
            if runs and turn.prompt.startswith(runs[-1][-1].prompt + runs[-1][-1].text):
                runs[-1].append(turn)
            else:
                runs.append([turn])
        for run in runs:
            joined = self._joined(run)
            yield from [joined] if joined is not None else (self._single(turn) for turn in run)

    def require_context(self, stop: int, prompt: str) -> None:
        """Raises `DataError` if the prompt of the last trained turn lacks one of its non-assistant messages, because
        templates silently skip unknown roles.
        """
        number = omitted_message(self._messages[:stop], prompt)
        if number is not None:
            message = self._messages[number]
            raise DataError(
                f"the chat template omits message {self._rows[number]} (role {message['role']}): "
                f"{str(message['content']).strip()[:80]!r} is not in the prompt after it; use a role that the template "
                "supports, or set --chat-template FILE"
            )

    def _write(self, messages: Sequence[Message], *, add_prompt: bool) -> str:
        return self._chat.write(messages, self._talk.tools, add_prompt=add_prompt)

    def _plain(self, marked: str) -> str:
        return self._talk.rendered(marked).text

    def _body(self, messages: Sequence[Message], prompt: str, *, thinks: bool = True) -> str | None:
        """Returns what the template writes for the last message after `prompt`; None if that does not continue it.

        `thinks`: whether to include a thought that the prompt opens.
        """
        whole = self._write(messages, add_prompt=False)
        if whole.startswith(prompt):
            return self._with_thought(messages[-1], whole[len(prompt) :], "")
        plain = self._write(messages[:-1], add_prompt=False)
        begun = THOUGHT_BEGINS.search(prompt, len(plain))
        if begun is None or not whole.startswith(prompt[: begun.start()]):
            return None
        written = whole[begun.start() :]
        return self._with_thought(messages[-1], written, begun.group()) if thinks else written

    def _with_thought(self, message: Message, written: str, begun: str) -> str:
        """Restores a thought that the model would write but the template omits.

        `begun` is the end of the prompt that opens the thought, or empty. Some templates (DeepSeek-R1) remove the
        thought from every turn, and some (MiniMax-M2) omit an empty thought although the prompt opens one.
        """
        thought, content = thought_of(message), str(message.get("content"))
        ended = _THOUGHT.match(written)
        if begun:
            end = _spelling_of(self._chat).thought_end or ("\n</think>\n\n" if begun.endswith("\n") else "</think>")
            answer = written[ended.end() if ended else 0 :]
            return thought + end + (answer.lstrip("\n") if "</think>" in content else answer)
        if thought and ended and ended[1] == "":  # Kimi-K2-Thinking writes an empty thought before its last answer
            return f"<think>{thought}</think>{written.partition('</think>')[2]}"
        if thought and "</think>" in content and "</think>" not in written:
            answer = content.rpartition("</think>")[2]
            return written.replace(answer if answer in written else answer.strip(), content, 1)
        return written

    def _ended(self, number: int, body: str) -> str:
        """Returns the turn up to and including its end token. Raises `DataError` if there is none."""
        if found := first_end(body, self._chat):
            return body[: sum(found)]
        message = self._messages[number]
        calls = bool(message.get("tool_calls"))
        result_follows = any(m["role"] == "tool" for m in self._messages[number + 1 : number + 2])
        headers = (_opening(self._chat, calls, role) for role in ("tool", "user")[not (calls or result_follows) :])
        end = next(filter(None, headers), None) or self._end_of_calls(message, body)
        if end is None:
            ends = ", ".join(self._chat.ends) or "none is known"
            raise DataError(
                f"the chat template writes no stop token ({ends}) after message {self._rows[number]}, which ends with "
                f"{self._plain(body)[-60:]!r}, so the model would not learn to stop; add the token that ends a turn to "
                "eos_token_id in the checkpoint's generation_config.json"
            )
        return body + end

    def _end_of_calls(self, message: Message, body: str) -> str | None:
        """Finds the end of a turn with calls by repeating the last call: DeepSeek-V3 omits the end after one call."""
        calls = message.get("tool_calls")
        if not calls:
            return None
        prompt = self._write([QUESTION], add_prompt=True)
        twice = self._body([QUESTION, {**message, "tool_calls": [*calls, calls[-1]]}], prompt) or ""
        last = body[max(body.rfind(calls[-1]["function"]["name"]), 0) :]
        at = twice.find(last, twice.find(body) + len(body)) if body in twice else -1
        tail = twice[at + len(last) :]
        found = first_end(tail, self._chat) if at >= 0 else None
        return tail[: sum(found)] if found else None

    def _joined(self, run: Sequence[_Turn]) -> SftTokens | None:
        """Joins turns into one sample. Returns None if the last prompt has different ids when tokenized as a whole."""
        if len(run) == 1:
            return self._single(run[0])
        tokens: list[int] = []
        mask: list[int] = []
        done = ""
        for turn in run:
            context = self._context(turn.prompt[len(done) :], tokens[-1:])
            answer = self._answer(turn.text)
            if turn is run[-1] and self._ids(turn.prompt) != tokens + context:
                return None
            tokens += context + answer
            mask += [0] * len(context) + [1] * len(answer)
            done = turn.prompt + turn.text
        return self._checked(tokens, mask, done)

    def _single(self, turn: _Turn) -> SftTokens:
        prompt, answer = self._ids(turn.prompt), self._answer(turn.text)
        return self._checked(prompt + answer, [0] * len(prompt) + [1] * len(answer), turn.prompt + turn.text)

    def _ids(self, marked: str) -> list[int]:
        return self._chat.encode(self._talk.rendered(marked))

    def _answer(self, text: str) -> list[int]:
        ids = self._ids(text)
        own = set(self._chat.ends.values())
        if ids[-1] not in own or own & set(ids[:-1]):
            raise DataError(
                f"the turn {self._plain(text)[:200]!r} must contain a stop token ({', '.join(self._chat.ends)}) only "
                "at its end; remove this row"
            )
        return ids

    def _context(self, text: str, end: Sequence[int]) -> list[int]:
        """Returns the ids of the text after an end token. Tokenizes both together, because some tokenizers treat a
        newline after a special token differently.
        """
        token = next((text for text, own in self._chat.ends.items() if [own] == list(end)), "")
        ids = self._ids(token + text)
        return ids[1:] if token and ids[:1] == list(end) else self._ids(text)

    def _checked(self, tokens: list[int], mask: list[int], marked: str) -> SftTokens:
        """Builds a sample from prompts and turns that were tokenized separately, as in generation.

        The ids may differ from those of the whole text, but must decode to it. Otherwise raises `DataError`.
        """
        text = self._talk.rendered(marked)
        if tokens != self._chat.encode(text) and self._chat.decode(tokens) != text.text:
            raise DataError(
                f"the ids of prompt and turns decode to {self._chat.decode(tokens)[:200]!r} instead of "
                f"{text.text[:200]!r}, because this tokenizer encodes text differently when it is split; remove this "
                "row"
            )
        return SftTokens(tuple(tokens), tuple(mask[mask.index(1) :]))

    def _unprompted(self, number: int, prompt: str) -> str:
        whole = self._write(self._messages[: number + 1], add_prompt=False)
        same = next((i for i, c in enumerate(prompt) if whole[i : i + 1] != c), len(prompt))
        low = max(same - 30, 0)
        return (
            f"the generation prompt for message {self._rows[number]} is {self._plain(prompt[low:])[-90:]!r}, but the "
            f"chat template renders the message as {self._plain(whole[low : same + 80])!r}, so training and inference "
            "prompts would differ; use --chat-template FILE or --apply-chat-template-kwargs to make the turn continue "
            "its prompt"
        )


def first_end(marked: str, chat: ChatRenderer) -> tuple[int, int] | None:
    """Returns (position, length) of the first stop token, ignoring control strings in the data."""
    found = [(marked.find(end), len(end)) for end in chat.ends]
    return min((one for one in found if one[0] >= 0), key=lambda one: (one[0], -one[1]), default=None)


@functools.lru_cache(maxsize=8)
def _spelling_of(chat: ChatRenderer) -> Spelling:
    found = Spelling.of(lambda messages, tools, add_prompt: chat.write(messages, tools, add_prompt=add_prompt))
    assert found is not None, "chat.write always returns a text"
    return found


@functools.lru_cache(maxsize=32)
def _opening(chat: ChatRenderer, calling: bool, role: str) -> str | None:
    """Returns the stop token that opens a turn of `role`, and so ends the previous turn; None if there is none."""
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": {}}}
    answer = {"role": "assistant", "content": "b"} | ({"tool_calls": [call]} if calling else {})
    follows = {"role": role, "content": "c"} | ({"tool_call_id": call["id"]} if role == "tool" else {})
    talk = _spelling_of(chat).spell([QUESTION, answer, follows]).messages
    try:
        turn, further = chat.write(talk[:2], None, add_prompt=False), chat.write(talk, None, add_prompt=False)
    except DataError:
        return None
    tail = further[len(turn) :] if further.startswith(turn) else ""
    found = first_end(tail, chat)
    return tail[: sum(found)] if found and not tail[: found[0]].strip() else None


@functools.lru_cache(maxsize=8)
def _generation_prompt_problem(chat: ChatRenderer) -> str | None:
    return generation_prompt_problem(lambda m, add_prompt: chat.write(m, None, add_prompt=add_prompt))


def generation_prompt_problem(render: Callable[[list[dict[str, Any]], bool], str | None]) -> str | None:
    """Returns why a template that ignores `add_generation_prompt` cannot be used for training, or None.

    It can be used if it writes no header before an answer, like Mistral's. `render` maps (messages, whether to add a
    generation prompt) to text, or None if unknown.
    """
    question: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    answered = [*question, {"role": "assistant", "content": "b"}]
    try:
        prompt, plain = render(question, True), render(question, False)
        turn, further = render(answered, False), render([*answered, *question], False)
    except DataError:  # the template may accept real conversations; rendering the row reports any error
        return None
    if prompt != plain or prompt is None or turn is None or further is None:
        return None
    if further.startswith(turn) and turn.startswith(prompt) and turn[len(prompt) :].lstrip().startswith("b"):
        return None
    return (
        f"the chat template ignores add_generation_prompt: it writes {prompt[-60:]!r} after a question and "
        f"{turn[-60:]!r} after an answer, so it is unclear where an answer begins; use a template that writes a "
        "generation prompt on request (--chat-template FILE)"
    )
