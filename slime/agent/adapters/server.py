"""`Adapter`: an HTTP server in front of an engine, which plays the API that an agent was written for.

    adapter = OpenAIAdapter(client, template, tool_format="hermes", decode=decode, sampling=sampling_params)
    url = await adapter.start()
    key = adapter.open_session()
    ...                                  # an agent talks to `url` with `key` as its API key
    samples = adapter.finish_session(key, sample, reward=1.0)

Consumes: requests of agents. Produces: answers, and samples. Waits for: engines, through the client. Is woken by:
requests, parts of answers, and clients that hang up, which ends their request in the engine.

Invariants
1. A key names one session, and is not guessed: 256 random bits. Who has none is refused.
2. The run's sampling parameters hold, whatever an agent asks for, unless `agent_sampling` lets it: training computes
   log-probs under them. What an agent had sampled otherwise is not trained. Its limit of tokens may only lower the
   run's.
3. A session that is finished or dropped is forgotten at once; its requests that still run are ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import orjson
from aiohttp import web

from slime.agent.adapters.turn import Answer, Engine, Event, Request, Turn
from slime.agent.adapters.wire import BadRequest, Frame, Wire
from slime.agent.parsers import FORMATS, format_of
from slime.agent.probe import tools_problem
from slime.agent.session import Session
from slime.agent.template import ConversationTemplate
from slime.core.errors import DataError, DeadlineExceeded, EngineError, RequestRejected, SlimeError, TakenBack
from slime.core.processes import http_url
from slime.core.sample import Sample
from slime.rollout.client.upstream import REQUEST_SCOPE, RequestScope
from slime.rollout.generate import LIMITS, Limits
from slime.rollout.guard import HEARTBEAT, Heartbeat
from slime.rollout.transcript import TRANSCRIPT, Transcript

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
MODEL = "slime"
"""The model that the list of models names; an agent may ask for any name and gets this one."""
SAMPLES_ALL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""What SGLang takes for a parameter that is not given."""


@dataclass(slots=True)
class OpenSession:
    """One session as the server keeps it."""

    session: Session
    params: dict[str, Any]
    limits: Limits
    max_turns: int | None
    num_turns: int = 0
    limit: asyncio.TimerHandle | None = None
    """Ends it; None without a limit of time."""
    refuses: str = ""
    """Why it takes no more requests; empty while it does."""
    scope: RequestScope | None = None
    """Of the execution that opened it: what ends its requests ends those of the agent."""
    transcript: Transcript | None = None
    """Of that execution: what it asked, and whether the run took any of it back."""
    heartbeat: Heartbeat | None = None
    """Of that execution: what a request of the agent is progress of."""
    running: set[asyncio.Task[Any]] = field(default_factory=set)

    def end_requests(self) -> None:
        """Those that run now; what they sampled counts for nothing."""
        for task in self.running:
            task.cancel()

    def refuse(self, why: str) -> None:
        """It is at a limit: from now on it takes no request."""
        self.refuses, self.session.hit_limit = why, True

    def end_at_limit(self, why: str) -> None:
        """As `refuse`; what runs ends, too."""
        self.refuse(why)
        self.end_requests()


class Adapter:
    """Sessions behind one port, on one event loop."""

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
        """`decode`: ids to text, control tokens included. `tool_format`: how the model writes calls; None: as the chat
        template does. `sampling`: of the run, for all sessions. `max_turns`: of a session; more are refused with HTTP
        400, which clients do not repeat.
        """
        self._engine, self._template, self._decode = engine, template, decode
        self.no_tools = ""
        """Why tools were refused, in every session: by the model's chat template. Empty: they were not."""
        self._tools_problem = tools_problem(template, tool_format)
        self._format = FORMATS.build(tool_format or format_of(template.chat.template) or "text", None)
        self._sampling, self._max_context, self._max_turns = dict(sampling), max_context_tokens, max_turns
        self._agent_sampling, self._model = agent_sampling, model
        self._sessions: dict[str, OpenSession] = {}
        self._closed = False
        self._runner: web.AppRunner | None = None

    # ---- sessions ----------------------------------------------------------------------------------------------------

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
        """A new session; returns its API key. `sampling`: of this session alone, over the adapter's, like the limits.

        `limits`: of the execution, by default of the one that opens the session; `max_context_tokens` in place of one.
        After `time_limit_s` its requests end, and more are refused with HTTP 400; its samples say TRUNCATED.
        """
        key = session_id or secrets.token_urlsafe(32)
        if key in self._sessions:
            raise DataError(f"got a second session with the key {key[:4]}…; a key is of one session")
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
            why = f"the execution had its {time_limit_s:g} seconds"
            found.limit = asyncio.get_running_loop().call_later(time_limit_s, found.end_at_limit, why)
        self._sessions[key] = found
        return key

    def session(self, key: str) -> Session:
        """An open session, to look at. Raises `KeyError`."""
        return self._sessions[key].session

    def finish_session(
        self,
        key: str,
        base: Sample,
        reward: float | Mapping[str, Any] | None = None,
        extra_metadata: Mapping[str, Any] | None = None,
    ) -> list[Sample]:
        """Ends a session; returns its samples, siblings of one execution. Requests that still run count for nothing."""
        session = self._take(key).session
        samples = session.samples(base, decode=self._decode, reward=reward)
        for sample in samples:
            sample.metadata |= dict(extra_metadata or {})
        return samples

    def drop_session(self, key: str) -> None:
        """Ends a session without samples."""
        self._take(key)

    def _take(self, key: str) -> OpenSession:
        found = self._sessions.pop(key)
        if found.limit is not None:
            found.limit.cancel()
        found.end_requests()
        return found

    # ---- the server --------------------------------------------------------------------------------------------------

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listens; returns the URL, which has no path."""
        self._runner = web.AppRunner(self.app(), handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        bound = self._runner.addresses[0]
        return http_url(host, bound[1])

    async def close(self) -> None:
        """Refuses new requests with HTTP 503, ends those that run, and stops to listen."""
        self._closed = True
        running = [task for one in self._sessions.values() for task in one.running]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/v1/models", self._models)
        for kind in self.wires:
            wire = kind()
            app.router.add_post(wire.path, self._handler(wire))
            for path, count in wire.counters.items():
                app.router.add_post(path, self._counter(wire, count))
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": len(self._sessions)})

    async def _models(self, http: web.Request) -> web.Response:
        try:
            self._session_of(http)
        except BadRequest as problem:
            return web.json_response({"error": {"message": str(problem)}}, status=problem.status)
        model = {"id": self._model, "object": "model", "type": "model", "display_name": self._model, "created": 0}
        return web.json_response({"object": "list", "data": [model], "has_more": False})

    def _handler(self, wire: Wire) -> Callable[[web.Request], Any]:
        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                found, request = self._session_of(http), self._read(wire, await _body(http))
                return await self._answer(wire, found, request, http)
            except BadRequest as problem:
                return _failed(wire, str(problem), problem.status)
            except SlimeError as problem:
                logger.warning("an agent's request failed: %s", problem)
                return _failed(wire, str(problem), _status(problem))

        return handle

    def _counter(self, wire: Wire, told: Callable[[int], dict[str, Any]]) -> Callable[[web.Request], Any]:
        async def handle(http: web.Request) -> web.Response:
            try:
                found, request = self._session_of(http), self._read(wire, await _body(http))
                return _json(told(found.session.num_prompt_tokens(request.messages, request.tools)))
            except BadRequest as problem:
                return _failed(wire, str(problem), problem.status)
            except SlimeError as problem:
                return _failed(wire, str(problem), _status(problem))

        return handle

    def _read(self, wire: Wire, body: Mapping[str, Any]) -> Request:
        request = wire.request(body)
        if request.tools and self._tools_problem:
            self.no_tools = self._tools_problem
            raise BadRequest(self.no_tools)
        return request

    def _session_of(self, http: web.Request) -> OpenSession:
        bearer = http.headers.get("Authorization", "")
        key = bearer[7:].strip() if bearer[:7].lower() == "bearer " else http.headers.get("x-api-key", "")
        if self._closed:
            raise BadRequest("the run takes no more requests", 503)
        if key not in self._sessions:
            raise BadRequest("got no key of an open session", 401)
        return self._sessions[key]

    async def _answer(self, wire: Wire, found: OpenSession, request: Request, http: web.Request) -> web.StreamResponse:
        if found.max_turns is not None and found.num_turns >= found.max_turns and not found.refuses:
            found.refuse(f"the execution had its {found.max_turns} turns")
        if found.limits.are_spent and not found.refuses:
            found.refuse(f"the execution has sampled its {found.limits.max_total_response_len} tokens")
        if found.refuses:
            raise BadRequest(found.refuses)
        if found.session.aborted:
            raise TakenBack("the run takes no more requests of this session")
        found.num_turns += 1
        REQUEST_SCOPE.set(found.scope)  # of this request's task alone
        TRANSCRIPT.set(found.transcript)
        HEARTBEAT.set(found.heartbeat)
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        found.running.add(task)
        try:
            turn = self._turn(found, request, http)
            if request.streams:
                return await _streamed(wire, turn.events(self._engine), request, http)
            answer = await _last(turn.events(self._engine))
            return _json(wire.whole(answer, request))
        finally:
            found.running.discard(task)

    def _turn(self, found: OpenSession, request: Request, http: web.Request) -> Turn:
        params = {**found.params, **(request.sampling if self._agent_sampling else {})}
        trained = all(value == found.params.get(name, SAMPLES_ALL.get(name)) for name, value in params.items())
        return Turn(
            session=found.session,
            session_id=f"{id(found):x}",
            request=request,
            params=params,
            trained=trained,
            limits=found.limits,
            decode=self._decode,
            reader=self._format.reader,
            call_id=self._format.call_id,
            end_ids=self._template.end_ids,
        )


async def _body(http: web.Request) -> Mapping[str, Any]:
    try:
        body = orjson.loads(await http.read())
    except ValueError as error:
        raise BadRequest(f"got a body that is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("got a body other than a JSON object")
    return body


async def _last(events: AsyncGenerator[Event, None]) -> Answer:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Answer):
                return event
    raise AssertionError("a turn ended without an answer")


async def _streamed(
    wire: Wire, events: AsyncGenerator[Event, None], request: Request, http: web.Request
) -> web.StreamResponse:
    """Frames as tokens come. What fails before the first one is an HTTP error still."""
    stream, response = wire.stream(request), web.StreamResponse()
    response.content_type = "text/event-stream"
    response.headers["Cache-Control"] = "no-cache"
    async with aclosing(events):
        try:
            async for event in events:
                if not response.prepared:
                    await response.prepare(http)
                    await _write(response, stream.begin())
                await _write(response, stream.frames(event))
        except SlimeError as problem:
            if not response.prepared:
                raise
            logger.warning("an agent's answer broke off: %s", problem)
            with contextlib.suppress(ConnectionError):
                await _write(response, stream.broken(str(problem), _status(problem)))
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, frames: Any) -> None:
    data = b"".join(frame.encoded() for frame in frames if isinstance(frame, Frame))
    if data:
        await response.write(data)


def _json(value: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _failed(wire: Wire, message: str, status: int) -> web.Response:
    return _json(wire.error(message, status), status)


def _status(problem: SlimeError) -> int:
    match problem:
        case TakenBack():
            return 503
        case DataError() | RequestRejected():
            return 400
        case DeadlineExceeded():
            return 504
        case EngineError():
            return 502
    return 500
