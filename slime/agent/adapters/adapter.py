"""`Adapter`: an HTTP server in front of an engine that speaks the API an agent was written for.

    adapter = OpenAIAdapter(client, template, tool_format="hermes", decode=decode, sampling=sampling_params)
    url = await adapter.start()
    key = adapter.open_session()
    ...                                  # an agent talks to `url` with `key` as its API key
    samples = adapter.finish_session(key, sample, reward=1.0)

The adapter reads agents' requests and the engine's output chunks. It writes responses, with events in the order of the
text, and builds samples. It waits for engines through the client, which continues requests after weight syncs and lost
engines and enforces its own time limit. When an agent disconnects, its requests are aborted in the engine.

Invariants
1. A key identifies one session and is unguessable (256 random bits). Requests without a valid key are rejected.
2. The run's sampling parameters override an agent's, because training computes log-probs under them. With
   `agent_sampling`, an agent may use its own, but turns sampled with them are not trained. An agent may always lower
   the token limit.
3. A session that is finished or dropped is removed immediately. Its running requests end with an error of their API.
4. The engine gets exactly the tokens of the session's branch, and the session records exactly the sampled ids.
5. The agent sees exactly what was sampled, up to its own stop strings. Text that may begin a tool call or a stop string
   is buffered until that is certain.
6. A turn that is cancelled before its end leaves no trace in the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Protocol

import orjson
from aiohttp import web

from slime.agent.adapters.fields import GUIDED, MAX_BODY_BYTES, BadRequest, Fields, ImageParts, body_of
from slime.agent.messages import Message, ToolCall
from slime.agent.parsers import Parsed, ToolFormat, UntilStop, format_or_text
from slime.agent.session import Branch, Session
from slime.agent.template import ConversationTemplate
from slime.agent.template_probe import tools_problem
from slime.core.errors import DataError, DeadlineExceeded, EngineError, RequestRejected, SlimeError, TakenBack
from slime.core.processes import http_url
from slime.core.sample import Sample
from slime.data.images import ConversationImages
from slime.public.http import READS_ENCODED
from slime.rollout.client.call import Generation, Pictures, joined
from slime.rollout.client.engine_client import STREAMED_INTERVAL, WHOLE
from slime.rollout.client.upstream import REQUEST_SCOPE, RequestScope
from slime.rollout.generate import LIMITS, Limits
from slime.rollout.guard import HEARTBEAT, Heartbeat
from slime.rollout.transcript import TRANSCRIPT, Transcript


@dataclass(frozen=True, slots=True)
class Request:
    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    """In the form that chat templates expect: `{"type": "function", "function": {...}}`."""
    max_tokens: int | None = None
    """The agent's limit on response length."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that the agent requests, such as the temperature."""
    stop: tuple[str, ...] = ()
    """The agent's stop strings. The text that the agent sees ends before the first of them."""
    streams: bool = False
    model: str = ""
    """The agent's name for the model, echoed in the response."""
    schema: str = ""
    """A JSON schema that the answer must satisfy; empty if it may be any text."""
    unanswerable: str = ""
    """Why the request cannot be answered, though its tokens can be counted; empty if it can."""
    counts: bool = True
    """Whether a stream reports the number of tokens."""


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    id: str
    message: Message
    finish: str
    """stop | length | calls"""
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    ill_formed: bool
    stop: str | None = None
    """The agent's stop string that ended the response; None if something else did."""


Event = Thought | Text | Answer


class ContextFull(DataError):
    """The prompt leaves no room for a response. Agents that shorten their history recognise the error of their API."""

    def __init__(self, num_prompt: int, most: int) -> None:
        super().__init__(f"the prompt has {num_prompt} tokens, but may have at most {most}")
        self.num_prompt, self.most = num_prompt, most


class Engine(Protocol):
    """The methods of `slime.rollout.client.engine_client.EngineClient` that a turn uses."""

    def stream(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        session_id: str | None = None,
        experts_from: int = 0,
        interval: int = 1,
        pictures: Pictures | None = None,
    ) -> AsyncGenerator[Generation, None]: ...


DECODED_AT_ONCE = 512
"""Tokens of a whole answer that are decoded together, in about a tenth of a millisecond."""
CONTEXT_IDS = 8
"""How many preceding ids are decoded with new ones."""


@dataclass(slots=True)
class Turn:
    session: Session
    session_id: str
    request: Request
    params: dict[str, Any]
    """Sampling parameters for the engine; `max_new_tokens` is the run's limit for one response."""
    trained: bool
    """Whether `params` are the run's, so that the turn can be trained on."""
    limits: Limits
    """Token limits of the execution, per conversation and in total."""
    decode: Callable[[Sequence[int]], str]
    """Converts ids to text, including control tokens."""
    format: ToolFormat
    """How the model writes thinking and calls."""
    end_ids: frozenset[int]
    """Tokens that end a response. They are stripped from its text unless the reader needs them."""
    images: ConversationImages | None = None
    """Where the images of the conversation are; None if it can have none."""
    full_is_error: bool = False
    """Whether a full context is an error, as in the APIs, and not an empty answer."""

    async def events(self, engine: Engine) -> AsyncGenerator[Event, None]:
        """Yields the response as it arrives; the last event is an `Answer`.

        Raises `DataError` if the chat template rejects the conversation, and `ContextFull` (see `full_is_error`).
        Errors of the client are propagated.
        """
        opened = self.session.open_turn(self.request.messages, self.request.tools)
        try:
            prompt, until = opened.branch.tokens, UntilStop(self.request.stop)
            prompt_end = self.decode(prompt[-16:])
            if self.request.schema and not self.format.can_constrain(prompt_end):
                raise DataError("an answer in JSON is not supported, because the model thinks before it answers")
            reader = self.format.reader(self.request.tools, prompt_end)
            num_prompt, parts = len(prompt), list[Generation]()
            params = self._params(num_prompt)
            if params["max_new_tokens"] > 0:
                text = Words(self.decode, self.end_ids, reader.ends, 1 if self.request.streams else DECODED_AT_ONCE)
                seen = await pictures_of(opened.branch, self.images)
                async with aclosing(self._stream(engine, opened.branch, params, seen)) as stream:
                    async for part in stream:
                        parts.append(part)
                        for begin in range(0, len(part.tokens), DECODED_AT_ONCE):
                            if begin:
                                await asyncio.sleep(0)  # others have their turn
                            if words := until.more(text.more(part.tokens[begin : begin + DECODED_AT_ONCE])):
                                for event in events_of(reader.feed(words)):
                                    yield event
                rest = until.more(text.end()) + until.end()
                for event in events_of(reader.feed(rest) if rest else ()):
                    yield event
            whole = joined(parts)
            held, parsed = reader.end()
            for event in events_of(held):
                yield event
            answer = self._answer(whole, parsed, num_prompt, until.found)
        except BaseException as problem:
            self.session.aborted = self.session.aborted or isinstance(problem, TakenBack)
            self.session.drop_turn(opened)
            raise
        self.session.end_turn(opened, answer.message, whole, ill_formed=parsed.ill_formed, trained=self.trained)
        yield answer

    def _stream(
        self, engine: Engine, branch: Branch, params: Mapping[str, Any], pictures: Pictures | None
    ) -> AsyncGenerator[Generation, None]:
        """Requests the answer: whole if nobody reads it as it arrives, and with the experts that the branch lacks."""
        return engine.stream(
            branch.tokens,
            params,
            session_id=self.session_id,
            experts_from=0 if branch.experts is None else branch.experts.end,
            interval=STREAMED_INTERVAL if self.request.streams else WHOLE,
            **({} if pictures is None else {"pictures": pictures}),
        )

    def _params(self, num_prompt: int) -> dict[str, Any]:
        most, asked = self.params["max_new_tokens"], self.request.max_tokens
        most = self.limits.next_answer(most if asked is None else min(most, asked), num_prompt)
        longest = self.limits.longest_prompt
        if self.full_is_error and longest is not None and num_prompt > longest:
            self.session.context_full = True
            raise ContextFull(num_prompt, longest)
        params = {**self.params, "max_new_tokens": most}
        if self.request.stop:
            own = params.get("stop") or ()
            params["stop"] = [*([own] if isinstance(own, str) else own), *self.request.stop]
        return params

    def _answer(self, whole: Generation, parsed: Parsed, num_prompt: int, stop: str | None) -> Answer:
        before = sum(len(message.calls) for message in self.request.messages)
        calls = tuple(
            ToolCall(self.format.call_id(name, number), name, arguments)
            for number, (name, arguments) in enumerate(parsed.calls, before)
        )
        finish = "stop" if stop is not None else whole.finish_reason
        return Answer(
            id=secrets.token_hex(12),
            message=Message("assistant", parsed.text, parsed.reasoning, calls, stop=stop or ""),
            finish="calls" if calls and finish == "stop" else finish,
            prompt_tokens=num_prompt,
            sampled_tokens=len(whole.tokens),
            cached_tokens=whole.cached_tokens,
            ill_formed=parsed.ill_formed,
            stop=stop,
        )


async def pictures_of(branch: Branch, images: ConversationImages | None) -> Pictures | None:
    """Reads the files of a branch's images in a thread. Returns None if it has none."""
    if images is None or not branch.images:
        return None
    digests = [image.digest for image in branch.images]
    return await images.in_thread(Pictures.of, digests, images.store, images.token_id, images.other_ids)


class Decoder:
    """Decodes ids incrementally. An incomplete character at the end of a chunk is held back until the next chunk.

    Invariant: the joined chunks are the text of all ids. A few ids are decoded with each chunk once more, because a
    tokenizer needs some preceding ids to know whether a space precedes it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode, self._ids = decode, list[int]()
        """The ids of `_known` and those that are not decoded yet."""
        self._num_known, self._known = 0, ""

    def more(self, ids: Sequence[int]) -> str:
        self._ids += ids
        text = self._decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        new = text[len(self._known) :]
        kept = self._ids[-CONTEXT_IDS:]
        known = self._decode(kept)
        if "\ufffd" in known:  # it may begin inside a character
            kept = self._ids[self._num_known :]
            known = self._decode(kept)
        self._ids, self._num_known, self._known = kept, len(kept), known
        return new

    def end(self) -> str:
        return self._decode(self._ids)[len(self._known) :]


class Words:
    """The text of an answer as its ids arrive, without the token that ends it. Does not depend on how ids are split."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], end_ids: Collection[int], kept: Collection[str], least: int
    ) -> None:
        """`kept`: end tokens that stay in the text. `least`: number of ids to decode at once, before the end."""
        self._text, self._decode = Decoder(decode), decode
        self._end_ids, self._kept, self._least = end_ids, kept, least
        self._ids: list[int] = []
        """Ids that are not decoded yet."""

    def more(self, ids: Sequence[int]) -> str:
        self._ids += ids
        if len(self._ids) < self._least:
            return ""
        held = self._ids[-1:] if self._ids[-1] in self._end_ids else []
        new = self._ids[: len(self._ids) - len(held)]
        self._ids = held
        return self._text.more(new) if new else ""

    def end(self) -> str:
        """Returns the rest of the text."""
        ids = self._ids
        if ids and ids[-1] in self._end_ids and self._decode(ids[-1:]) not in self._kept:
            ids = ids[:-1]
        return (self._text.more(ids) if ids else "") + self._text.end()


def events_of(parts: Sequence[tuple[str, str]] | Any) -> list[Event]:
    """Converts a reader's (kind, text) parts to events."""
    return [Thought(text) if kind == "thinking" else Text(text) for kind, text in parts if text]


# The contract of a wire format: it translates the requests and responses of one public API, and has no access to
# sessions, engines or tokens. Each format is one file in this folder.


@dataclass(frozen=True, slots=True)
class Frame:
    """One server-sent event."""

    data: Mapping[str, Any] | str
    event: str | None = None

    def encoded(self) -> bytes:
        data = self.data.encode() if isinstance(self.data, str) else orjson.dumps(self.data)
        head = f"event: {self.event}\n".encode() if self.event else b""
        return b"%sdata: %s\n\n" % (head, data)


class Stream(ABC):
    """Builds the frames of one streamed response."""

    @abstractmethod
    def begin(self) -> Iterable[Frame]:
        """Returns the frames that precede all sampled text."""

    @abstractmethod
    def frames(self, event: Event) -> Iterable[Frame]:
        """Returns the frames for an event. An `Answer` ends the stream."""

    @abstractmethod
    def broken(self, message: str, status: int) -> Iterable[Frame]:
        """Returns the frames that end a stream after an error."""


class Wire(ABC):
    path: ClassVar[str]
    fields: ClassVar[Fields]
    """What the fields of a request body do."""
    counters: ClassVar[Mapping[str, Callable[[int], dict[str, Any]]]] = {}
    """POST route that counts a request's tokens -> function that turns the count into the response body."""

    def __init__(self, images: ImageParts | None = None) -> None:
        """`images`: reads the images in messages."""
        self.images = images or ImageParts()

    @abstractmethod
    def request(self, body: Mapping[str, Any]) -> Request:
        """Parses a request body. Raises `BadRequest` if it is invalid in this API or not supported."""

    @abstractmethod
    def response(self, answer: Answer, request: Request) -> dict[str, Any]:
        """Returns the body of a non-streamed response."""

    @abstractmethod
    def stream(self, request: Request) -> Stream:
        """Returns a builder for the frames of a streamed response."""

    @abstractmethod
    def error(self, message: str, status: int) -> dict[str, Any]:
        """Returns the body of an error response."""

    @abstractmethod
    def context_full(self, problem: ContextFull) -> dict[str, Any]:
        """Returns the body of the error by which agents of this API recognise a full context."""


logger = logging.getLogger(__name__)

CLOSED = "the run no longer accepts requests"
LAST_FRAMES_S = 5.0
"""How long the last frames of a stream may wait for an agent that does not read."""
ANY_KINDS = {401: "authentication_error", 404: "not_found_error"}
BACKLOG = 4096
"""Connections that the kernel holds until they are accepted, so that a thousand agents can start at the same time."""
MODEL = "slime"
"""The only entry in the model list. Requests with any other name use the same model."""
SAMPLES_ALL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""SGLang's defaults for sampling parameters."""


def with_sampling(params: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Returns the run's parameters with others on top, and whether they still are the run's, so that the turn can be
    trained on.
    """
    trained = all(value == params.get(name, SAMPLES_ALL.get(name)) for name, value in own.items())
    return {**params, **own}, trained


@dataclass(slots=True)
class OpenSession:
    session: Session
    params: dict[str, Any]
    limits: Limits
    max_turns: int | None
    num_turns: int = 0
    limit: asyncio.TimerHandle | None = None
    """Timer for the session's time limit; None if there is no limit."""
    refuses: str = ""
    """Why the session rejects requests; empty while it accepts them."""
    scope: RequestScope | None = None
    """The execution's request scope. Cancelling it also cancels the agent's requests."""
    transcript: Transcript | None = None
    """The execution's transcript. It records the agent's requests and whether the run cancelled any."""
    heartbeat: Heartbeat | None = None
    """The execution's heartbeat. Each agent request counts as progress."""
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    end: BadRequest | None = None
    """The error that running requests get; None while none has been ended."""

    def end_requests(self, why: str, status: int) -> None:
        """Ends running requests and discards their sampled tokens. Their agents get this error."""
        self.end = BadRequest(why, status)
        for task in self.running:
            task.cancel()

    @contextlib.contextmanager
    def ending_requests(self) -> Iterator[None]:
        """Raises the error of `end_requests`, if that interrupts the block. An agent that hangs up cancels it, too."""
        task = asyncio.current_task()
        assert task is not None, "a handler must run in a task"
        self.running.add(task)
        try:
            yield
        except asyncio.CancelledError as cancelled:
            if self.end is None or task.uncancel():
                raise
            raise BadRequest(str(self.end), self.end.status) from cancelled
        finally:
            self.running.discard(task)

    def refuse(self, why: str) -> None:
        """Rejects all further requests because a limit is reached. `why`: the reason reported to the agent."""
        self.refuses, self.session.hit_limit = why, True

    def end_at_limit(self, why: str) -> None:
        """Rejects all further requests and ends running ones."""
        self.refuse(why)
        self.end_requests(why, 400)


class Adapter:
    """Serves many sessions on one port and one event loop."""

    wires: ClassVar[tuple[type[Wire], ...]] = ()

    def __init__(
        self,
        engine: Engine,
        template: ConversationTemplate,
        *,
        decode: Callable[[Sequence[int]], str],
        tool_format: str | None = None,
        sampling: Mapping[str, Any],
        max_context_tokens: int | None = None,
        max_turns: int | None = None,
        agent_sampling: bool = False,
        model: str = MODEL,
    ) -> None:
        """`decode`: converts ids to text, including control tokens. `tool_format`: how the model writes tool calls;
        None: derived from the chat template. `sampling`: the run's parameters, for all sessions. `max_turns`: limit per
        session; later requests get HTTP 400, which clients do not retry.
        """
        self._engine, self._template, self._decode = engine, template, decode
        self.no_tools = ""
        """Why the chat template does not support tools; empty until an agent request with tools is rejected."""
        self._tools_problem = tools_problem(template, tool_format)
        self._format = format_or_text(template.chat.template, tool_format)
        self._sampling, self._max_context, self._max_turns = dict(sampling), max_context_tokens, max_turns
        self._agent_sampling, self._model = agent_sampling, model
        self._sessions: dict[str, OpenSession] = {}
        self._closed = False
        self._runner: web.AppRunner | None = None

    def open_session(
        self,
        session_id: str | None = None,
        *,
        sampling: Mapping[str, Any] | None = None,
        max_context_tokens: int | None = None,
        max_turns: int | None = None,
        time_limit_s: float | None = None,
        limits: Limits | None = None,
    ) -> str:
        """Opens a session and returns its API key. `sampling` and the limits override the adapter's for this session.

        `limits`: defaults to the calling execution's; `max_context_tokens` overrides one of them. After `time_limit_s`,
        running requests are cancelled, further ones get HTTP 400, and the last branch's sample is TRUNCATED.
        """
        key = session_id or secrets.token_urlsafe(32)
        if key in self._sessions:
            raise DataError(f"the session key {key[:4]}… is already in use; each session needs its own key")
        limits, own = limits or LIMITS.get() or Limits(), max_context_tokens or self._max_context
        found = OpenSession(
            Session(self._template),
            {**self._sampling, **(sampling or {})},
            limits if own is None else replace(limits, max_context_len=own),
            max_turns or self._max_turns,
            scope=REQUEST_SCOPE.get(),
            transcript=TRANSCRIPT.get(),
            heartbeat=HEARTBEAT.get(),
        )
        if time_limit_s is not None:
            why = f"the execution has reached its time limit of {time_limit_s:g} s"
            found.limit = asyncio.get_running_loop().call_later(time_limit_s, found.end_at_limit, why)
        self._sessions[key] = found
        return key

    def session(self, key: str) -> Session:
        """Returns an open session, for inspection. Raises `KeyError`."""
        return self._sessions[key].session

    def finish_session(
        self,
        key: str,
        base: Sample,
        reward: float | Mapping[str, Any] | None = None,
        extra_metadata: Mapping[str, Any] | None = None,
    ) -> list[Sample]:
        """Ends a session and its running requests. Returns its samples, which are siblings of one execution."""
        session = self._take(key).session
        samples = session.samples(base, decode=self._decode, reward=reward)
        for sample in samples:
            sample.metadata |= dict(extra_metadata or {})
        return samples

    def drop_session(self, key: str) -> None:
        self._take(key)

    def _take(self, key: str) -> OpenSession:
        found = self._sessions.pop(key)
        if found.limit is not None:
            found.limit.cancel()
        found.end_requests("the session of this API key ended before the response did", 401)
        return found

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Starts listening and returns the URL without a path."""
        self._runner = web.AppRunner(self.app, handler_cancellation=True, access_log=None, auto_decompress=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=BACKLOG)
        await site.start()
        bound = self._runner.addresses[0]
        return http_url(host, bound[1])

    async def close(self) -> None:
        """Rejects new requests with HTTP 503, ends running ones with it, and stops listening."""
        self._closed = True
        await ended(self._sessions.values(), CLOSED, 503)
        if self._runner is not None:
            await self._runner.cleanup()

    @cached_property
    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app[READS_ENCODED] = True
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/v1/models", self._models)
        for kind in self.wires:
            wire = kind(ImageParts(self._template.images, self._template.why_no_images))
            app.router.add_post(wire.path, self._handler(wire, partial(self._answer, wire)))
            for path, count in wire.counters.items():
                app.router.add_post(path, self._handler(wire, self._counter(count)))
        app.router.add_route("*", "/{path:.*}", self._unknown)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": len(self._sessions)})

    async def _models(self, http: web.Request) -> web.Response:
        try:
            self._session_of(http)
        except BadRequest as problem:
            return _failed_anywhere(str(problem), problem.status)
        model = {"id": self._model, "object": "model", "type": "model", "display_name": self._model, "created": 0}
        return web.json_response({"object": "list", "data": [model], "has_more": False})

    async def _unknown(self, http: web.Request) -> web.Response:
        routes = sorted(path for kind in self.wires for path in (kind.path, *kind.counters))
        what = f"there is no route {http.method} {http.path[:200]}; send POST to {', '.join(routes)}"
        return _failed_anywhere(what, 404)

    def _handler(self, wire: Wire, answer: Callable[..., Any]) -> Callable[[web.Request], Any]:
        """Returns an aiohttp handler. `answer`: async function (session, request, HTTP request) -> response."""

        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                self._session_of(http)
                body = await body_of(http)
                self._session_of(http)  # it may have ended while the body arrived
                if (images := self._template.images) is None:
                    request = self._read(wire, body)
                else:  # images take long to decode
                    request = await images.in_thread(self._read, wire, body)
                found = self._session_of(http)
                response: web.StreamResponse = await answer(found, request, http)
                return response
            except BadRequest as problem:
                return _failed(wire, str(problem), problem.status)
            except ContextFull as problem:
                return _json(wire.context_full(problem), 400)
            except RecursionError:
                return _failed(wire, "the body is nested too deeply", 400)
            except SlimeError as problem:
                logger.warning("an agent's request failed: %s", problem)
                return _failed(wire, str(problem), _status(problem))

        return handle

    def _counter(self, count: Callable[[int], dict[str, Any]]) -> Callable[..., Any]:
        async def answer(found: OpenSession, request: Request, _: web.Request) -> web.Response:
            return _json(count(found.session.num_prompt_tokens(request.messages, request.tools)))

        return answer

    def _read(self, wire: Wire, body: Mapping[str, Any]) -> Request:
        wire.fields.check(body)
        request = wire.request(body)
        if request.schema and not self._agent_sampling:
            raise BadRequest(
                f"an answer in JSON is not supported: {GUIDED}; ask for JSON in the prompt, or set --agent-sampling, "
                "with which such answers are not trained"
            )
        if request.tools and self._tools_problem:
            self.no_tools = self._tools_problem
            raise BadRequest(self.no_tools)
        return request

    def _session_of(self, http: web.Request) -> OpenSession:
        bearer = http.headers.get("Authorization", "")
        key = bearer[7:].strip() if bearer[:7].lower() == "bearer " else http.headers.get("x-api-key", "")
        if self._closed:
            raise BadRequest(CLOSED, 503)
        if key not in self._sessions:
            raise BadRequest("the API key does not belong to an open session", 401)
        return self._sessions[key]

    async def _answer(self, wire: Wire, found: OpenSession, request: Request, http: web.Request) -> web.StreamResponse:
        if not found.refuses and found.limits.ends_before_turn(found.num_turns, found.max_turns):
            found.refuse(f"the execution has reached its limit of {found.max_turns} turns")
        if found.limits.are_spent and not found.refuses:
            found.limits.spent["max_total_response_len"] += 1
            found.refuse(f"the execution has reached its limit of {found.limits.max_total_response_len} sampled tokens")
        if found.refuses or request.unanswerable:
            raise BadRequest(found.refuses or request.unanswerable)
        if found.session.aborted:
            raise TakenBack("the run no longer accepts requests from this session")
        found.num_turns += 1
        REQUEST_SCOPE.set(found.scope)  # only in this request's task
        TRANSCRIPT.set(found.transcript)
        HEARTBEAT.set(found.heartbeat)
        events = self._turn(found, request).events(self._engine)
        if request.streams:
            return await _streamed(wire, events, request, http, found)
        with found.ending_requests():
            answer = await last_event(events)
        return _json(wire.response(answer, request))

    def _turn(self, found: OpenSession, request: Request) -> Turn:
        params, trained = with_sampling(found.params, request.sampling if self._agent_sampling else {})
        if request.schema:
            params, trained = {**params, "json_schema": request.schema}, False
        return Turn(
            session=found.session,
            session_id=f"{id(found):x}",
            request=request,
            params=params,
            trained=trained,
            limits=found.limits,
            decode=self._decode,
            format=self._format,
            end_ids=self._template.end_ids,
            images=self._template.images,
            full_is_error=True,
        )


async def last_event(events: AsyncGenerator[Event, None]) -> Answer:
    """Returns the answer at the end of a turn's events."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Answer):
                return event
    raise AssertionError("a turn must end with an answer")


async def ended(sessions: Iterable[OpenSession], why: str, status: int) -> None:
    """Ends the requests of sessions with an error, and waits until their agents have got it."""
    running = [task for one in sessions for task in one.running]
    for one in sessions:
        one.end_requests(why, status)
    if running:
        await asyncio.wait(running, timeout=2 * LAST_FRAMES_S)


async def _streamed(
    wire: Wire, events: AsyncGenerator[Event, None], request: Request, http: web.Request, found: OpenSession
) -> web.StreamResponse:
    """Sends frames as tokens arrive. A failure before the first frame still becomes an HTTP error."""
    stream, response = wire.stream(request), web.StreamResponse()
    response.content_type = "text/event-stream"
    response.headers["Cache-Control"] = "no-cache"
    async with aclosing(events):
        try:
            with found.ending_requests():
                async for event in events:
                    if not response.prepared:
                        await response.prepare(http)
                        await _write(response, stream.begin())
                    await _write(response, stream.frames(event))
        except (SlimeError, BadRequest) as problem:
            if not response.prepared:
                raise
            if isinstance(problem, SlimeError):
                logger.warning("an agent's response was interrupted: %s", problem)
            await _broken(response, stream.broken(str(problem), _status(problem)), http)
    await response.write_eof()
    return response


async def _broken(response: web.StreamResponse, frames: Iterable[Frame], http: web.Request) -> None:
    """Sends the last frames of a stream. Drops the connection of an agent that does not read them."""
    try:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(LAST_FRAMES_S):
                await _write(response, frames)
    except TimeoutError:
        if http.transport is not None:
            http.transport.abort()


async def _write(response: web.StreamResponse, frames: Any) -> None:
    data = b"".join(frame.encoded() for frame in frames if isinstance(frame, Frame))
    if data:
        await response.write(data)


def _json(value: Mapping[str, Any], status: int = 200) -> web.Response:
    try:
        body = orjson.dumps(value)
    except TypeError:  # arguments of a call with an integer above 64 bits, or nested deeply
        body = json.dumps(value).encode()
    return web.Response(body=body, status=status, content_type="application/json")


def _failed(wire: Wire, message: str, status: int) -> web.Response:
    return _json(wire.error(message, status), status)


def _failed_anywhere(message: str, status: int) -> web.Response:
    """Returns an error in the form of both APIs, for what belongs to none."""
    kind = ANY_KINDS.get(status, "server_error")
    error = {"type": kind, "message": message, "param": None, "code": None}
    return _json({"type": "error", "error": error}, status)


def _status(problem: SlimeError | BadRequest) -> int:
    match problem:
        case BadRequest(status=status):
            return status
        case TakenBack():
            return 503
        case DataError() | RequestRejected():
            return 400
        case DeadlineExceeded():
            return 504
        case EngineError():
            return 502
    return 500
