"""One request of an agent, whatever wire format it came by: what is asked, and the answer as it comes.

Consumes: a request, the parts of an engine's answer. Produces: events, in the order of the text; in the end the
answer, booked in the session. Waits for: the engine, through the client, which lives through weight syncs and lost
engines, and has a limit of its own. Is woken by: parts; a cancellation, which ends the request in the engine.

Invariants
1. The ids that are sent are the tokens of the session's branch; the ids that are booked are those that were sampled.
2. What the agent reads is what was sampled: text is held back while it may turn out to be the beginning of a call.
3. A turn that is cancelled before its end leaves nothing in the session.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime.agent.messages import Message, ToolCall
from slime.agent.parsers import AnswerReader, Parsed
from slime.agent.session import Session
from slime.core.errors import TakenBack
from slime.core.sample import NOT_SAMPLED
from slime.rollout.client.call import Generation
from slime.rollout.generate import Limits


@dataclass(frozen=True, slots=True)
class Request:
    """What an agent asks for."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    """As chat templates read them: `{"type": "function", "function": {...}}`."""
    max_tokens: int | None = None
    """Of the answer, as the agent wants it."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Temperature and the like, as the agent wants them."""
    stop: tuple[str, ...] = ()
    streams: bool = False
    model: str = ""
    """As the agent calls it; the answer says the same."""
    thinks: bool = False
    """Whether the wire format carries thinking in both directions."""


@dataclass(frozen=True, slots=True)
class Thought:
    """Some thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """Some text."""

    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole turn."""

    id: str
    message: Message
    finish: str
    """stop | length | calls"""
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    ill_formed: bool


Event = Thought | Said | Answer


class Engine(Protocol):
    """What a turn needs of `slime.rollout.client.client.EngineClient`."""

    def stream(
        self, input_ids: Sequence[int], sampling_params: Mapping[str, Any], *, session_id: str | None = None
    ) -> AsyncGenerator[Generation, None]: ...


@dataclass(slots=True)
class Turn:
    """A request in a session, with what a run wants of it."""

    session: Session
    session_id: str
    request: Request
    params: dict[str, Any]
    """Of the engine; `max_new_tokens` is the run's limit of one answer."""
    trained: bool
    """They are the run's."""
    limits: Limits
    """Of the execution: its conversations, and all that it samples."""
    decode: Callable[[Sequence[int]], str]
    """Ids to text, control tokens included."""
    reader: Callable[[Sequence[Any], str], AnswerReader]
    """(tools, the end of the prompt as text) -> what reads an answer."""
    call_id: Callable[[str, int], str]
    """(function, number of the call in its conversation) -> what its result names it by."""
    end_ids: frozenset[int]
    """They end an answer, and its text has none of them, but for those that its reader reads."""
    interval: int = 1
    """Tokens of an event, about."""

    async def events(self, engine: Engine) -> AsyncGenerator[Event, None]:
        """The answer as it comes; an `Answer` is the last one.

        Raises `DataError` if the chat template refuses the conversation, and what the client raises.
        """
        opened = self.session.open_turn(self.request.messages, self.request.tools, thinks=self.request.thinks)
        try:
            prompt = opened.branch.tokens
            reader = self.reader(self.request.tools, self.decode(prompt[-16:]))
            num_prompt, parts = len(prompt), list[Generation]()
            params = self._params(num_prompt)
            if params["max_new_tokens"] > 0:
                text = Text(self.decode)
                async with aclosing(engine.stream(list(prompt), params, session_id=self.session_id)) as stream:
                    async for part in stream:
                        parts.append(part)
                        ended = bool(part.tokens) and part.tokens[-1] in self.end_ids
                        ended = ended and self.decode(part.tokens[-1:]) not in reader.ends
                        words = part.tokens[:-1] if ended else part.tokens
                        for event in said(reader.feed(text.more(words))):
                            yield event
                rest = text.end()
                for event in said(reader.feed(rest) if rest else ()):
                    yield event
            whole = joined(parts)
            held, parsed = reader.end()
            for event in said(held):
                yield event
            answer = self._answer(whole, parsed, num_prompt)
        except BaseException as problem:
            self.session.aborted = self.session.aborted or isinstance(problem, TakenBack)
            self.session.drop_turn(opened)
            raise
        self.session.end_turn(opened, answer.message, whole, ill_formed=parsed.ill_formed, trained=self.trained)
        yield answer

    def _params(self, num_prompt: int) -> dict[str, Any]:
        most, asked = self.params["max_new_tokens"], self.request.max_tokens
        most = self.limits.next_answer(most if asked is None else min(most, asked), num_prompt)
        params = {**self.params, "max_new_tokens": most}
        if self.request.stop:
            own = params.get("stop") or ()
            params["stop"] = [*([own] if isinstance(own, str) else own), *self.request.stop]
        return params

    def _answer(self, whole: Generation, parsed: Parsed, num_prompt: int) -> Answer:
        before = sum(len(message.calls) for message in self.request.messages)
        calls = tuple(
            ToolCall(self.call_id(name, number), name, arguments)
            for number, (name, arguments) in enumerate(parsed.calls, before)
        )
        return Answer(
            id=secrets.token_hex(12),
            message=Message("assistant", parsed.text, parsed.reasoning, calls),
            finish="calls" if calls and whole.finish_reason == "stop" else whole.finish_reason,
            prompt_tokens=num_prompt,
            sampled_tokens=len(whole.tokens),
            cached_tokens=whole.cached_tokens,
            ill_formed=parsed.ill_formed,
        )


class Text:
    """Ids to text, part by part: what a part leaves unfinished (half a character) comes with the next one.

    Invariant: the parts joined are the text of all ids, at the cost of decoding each id a few times, not all of them
    each time: a tokenizer needs some ids before the new ones to know whether a space belongs between.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode, self._ids = decode, list[int]()
        self._before, self._done = 0, 0

    def more(self, ids: Sequence[int]) -> str:
        """The text that these ids add."""
        self._ids += ids
        known = self._decode(self._ids[self._before : self._done])
        text = self._decode(self._ids[self._before :])
        if text.endswith("\ufffd"):
            return ""
        self._before, self._done = self._done, len(self._ids)
        return text[len(known) :]

    def end(self) -> str:
        """The text of what stayed unfinished."""
        known = self._decode(self._ids[self._before : self._done])
        return self._decode(self._ids[self._before :])[len(known) :]


def said(parts: Sequence[tuple[str, str]] | Any) -> list[Event]:
    """Events of what a reader lets out: (kind, text)."""
    return [Thought(text) if kind == "thinking" else Said(text) for kind, text in parts if text]


def joined(parts: Sequence[Generation]) -> Generation:
    """The parts of a stream as one answer; without one, an answer of no tokens that a length limit ended."""
    if not parts:
        return Generation((), (), "length", NOT_SAMPLED, "")
    last = parts[-1]
    return Generation(
        tokens=tuple(token for part in parts for token in part.tokens),
        log_probs=tuple(value for part in parts for value in part.log_probs),
        finish_reason=last.finish_reason,
        weight_version=tuple(version for part in parts for version in part.versions),
        text="".join(part.text for part in parts),
        prompt_tokens=last.prompt_tokens,
        cached_tokens=max(part.cached_tokens for part in parts),
        routed_experts=last.routed_experts,
    )
