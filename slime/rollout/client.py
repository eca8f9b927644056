"""`EngineClient`: token ids in; token ids, log-probs and weight version out, through one connection pool.

Consumes: requests of rollout tasks (`generate`, `stream`). Produces: a `Generation`, or its parts. Waits for: a free
connection, then the engine's answer, within `--request-timeout-s`; while it is paused, for `resume`. Is woken by: the
answer, the limit, `resume`, or the end of its `RequestScope`, by which the loop ends every request that its tasks have
running, wherever they are in user code. A cancelled or expired request is aborted in its engine by a background task,
because an engine does not notice at once that a client hung up; `drain` waits for those tasks.

Invariants
1. Only what can succeed is tried again: connection errors, 408, 429, 502, 503, 504; a 500 once; no other 4xx ever. Each
   try has an id of its own, because an engine refuses one that it is still working on; the try before is aborted.
2. What is sent and what is returned has passed the checks of `generation`.
3. The parts of a stream, one after the other, are what `generate` would return. Only the first is asked for again: a
   stream that breaks later is an error, because its tokens have been handed out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from slime.core.errors import DeadlineExceeded, EngineError, RequestRejected
from slime.core.ports import ROUTED_EXPERTS_MARK
from slime.core.routed_experts import ExpertFormat
from slime.rollout.generation import (
    NEVER_SENT,
    Generation,
    check_request,
    decode,
    parse_experts,
    parse_generation,
    parse_part,
)

logger = logging.getLogger(__name__)

RETRY_STATUSES = frozenset({408, 429, 502, 503, 504})
MAY_RUN_STATUSES = frozenset({408, 500, 502, 504})
"""The router gave up on an engine that may still work on the request."""
MAX_TRIES = 5
FIRST_RETRY_S, LONGEST_RETRY_S = 0.25, 8.0
ABORT_TIMEOUT_S = 10.0
EVERY_REQUEST = ""
PAUSE_POLL_S, PAUSE_REPEAT, PAUSE_POLLS = 0.01, 20, 200
"""An abort can overtake a request on its way to the engine, so it is repeated."""
ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
"""Read by the router under its consistent-hashing and manual policies."""


@dataclass(slots=True)
class RequestScope:
    """The requests of one rollout. Tasks inherit it through `REQUEST_SCOPE`; aborting it reaches all of them."""

    rids: set[str] = field(default_factory=set)
    aborted: bool = False


REQUEST_SCOPE: ContextVar[RequestScope | None] = ContextVar("slime_request_scope", default=None)


Post = Callable[[Mapping[str, Any], Mapping[str, str], RequestScope | None], Awaitable[tuple[int, bytes]]]
"""Sends one try and returns status and body."""


class EngineClient:
    """One router (or one server), many requests. Use on one event loop; `close` at the end."""

    def __init__(
        self,
        base_url: str,
        *,
        request_timeout_s: float = 600.0,
        max_concurrency: int = 256,
        vocab_size: int | None = None,
        api_key: str | None = None,
        token_versions: bool = False,
        experts: ExpertFormat | None = None,
    ) -> None:
        """`max_concurrency`: requests in flight at most. `vocab_size`: ids beyond it kill an engine and are refused.
        `api_key`: the token that the engines ask for. `token_versions`: engines must tell the version of each token.
        `experts`: engines are asked for the routed experts, which look like this.
        """
        self.base_url = base_url.rstrip("/")
        self._request_timeout_s, self._vocab_size = request_timeout_s, vocab_size
        self._token_versions, self._experts = token_versions, experts
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._slots = asyncio.Semaphore(max_concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        session_id: str | None = None,
        experts_from: int = 0,
    ) -> Generation:
        """Samples a continuation of `input_ids`. `experts_from`: routed experts of earlier tokens are not sent again.

        Raises `RequestRejected` if the request can never succeed, `EngineError` if engine or router fail or answer
        nonsense, `DeadlineExceeded` after `request_timeout_s` (queueing in this client not counted).
        """
        scope = REQUEST_SCOPE.get()
        payload, headers = self._request(input_ids, sampling_params, session_id, experts_from)
        async with self._slots:
            await self._open.wait()
            if scope is not None and scope.aborted:
                return NEVER_SENT
            try:
                async with asyncio.timeout(self._request_timeout_s):
                    answer = await self._post_with_retries(payload, headers, scope)
            except TimeoutError as expiry:
                self._abort_later([payload["rid"]])
                raise self._late(payload) from expiry
            except asyncio.CancelledError:
                self._abort_later([payload["rid"]])
                raise
        if answer is None:
            return NEVER_SENT
        generation = parse_generation(answer, self._token_versions)
        return self._with_experts(generation, answer, payload, len(generation.tokens))

    async def stream(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        session_id: str | None = None,
        experts_from: int = 0,
    ) -> AsyncGenerator[Generation, None]:
        """As `generate`, in parts: yields what was sampled since the part before, for functions that stop early.

        Closing the iterator aborts the request in its engine; what it sampled beyond the last part is nobody's. Each
        part but the last has the finish reason `abort`, which is what it is if none comes after it. Engines send what
        is new in each part (`incremental_streaming_output`, which slime's engines are started with). The last part
        has the routed experts of all: a stream that is closed before it has none.
        """
        scope = REQUEST_SCOPE.get()
        payload, headers = self._request(input_ids, sampling_params, session_id, experts_from)
        payload["stream"], content, rids = True, list[aiohttp.StreamReader](), set[str]()
        num_sampled = 0

        async def post(*_: Any) -> tuple[int, bytes]:
            rids.add(payload["rid"])
            if scope is not None:
                scope.rids.add(payload["rid"])
            sent = self._get_session().post(f"{self.base_url}/generate", json=payload, headers=headers)
            response = await connection.enter_async_context(sent)
            if response.status != 200:
                return response.status, await response.read()
            content[:] = [response.content]
            body = await _event(response.content)
            error = decode(body).get("error")
            return int(error.get("code") or 500) if error else 200, body

        async with self._slots, AsyncExitStack() as connection:
            await self._open.wait()
            ends_at, ended = asyncio.get_running_loop().time() + self._request_timeout_s, False
            try:
                async with asyncio.timeout_at(ends_at):
                    aborted = scope is not None and scope.aborted
                    answer = None if aborted else await self._post_with_retries(payload, headers, scope, post)
                while answer is not None and not ended:
                    part, ended = parse_part(answer, self._token_versions)
                    num_sampled += len(part.tokens)
                    yield self._with_experts(part, answer, payload, num_sampled) if ended else part
                    if not ended:
                        async with asyncio.timeout_at(ends_at):
                            answer = decode(await _event(content[0]))
                if not ended:
                    yield NEVER_SENT
            except TimeoutError as expiry:
                raise self._late(payload) from expiry
            except aiohttp.ClientError as broken:
                raise EngineError(f"the stream of request {payload['rid']} broke: {broken!r}") from broken
            finally:
                if rids and not ended:
                    self._abort_later([payload["rid"]])
                if scope is not None:
                    scope.rids.difference_update(rids)

    async def abort_scope(self, scope: RequestScope) -> None:
        """Ends all requests of a scope: running ones return their partial tokens, later ones are never sent."""
        scope.aborted = True
        await self._abort(list(scope.rids))

    async def pause(self, scope: RequestScope) -> None:
        """Ends every request of the engines; those of `scope` return what they have. Later ones wait for `resume`.

        What has not ended after `PAUSE_POLLS` is left to the engine.
        """
        self._open.clear()
        for turn in range(PAUSE_POLLS):
            if not scope.rids:
                return
            if turn % PAUSE_REPEAT == 0:
                await self._abort([EVERY_REQUEST])
            await asyncio.sleep(PAUSE_POLL_S)

    def resume(self) -> None:
        """Requests go again."""
        self._open.set()

    async def workers(self) -> list[str]:
        """Addresses of the servers behind the router; a server that is not a router is its own only worker."""
        try:
            async with self._get_session().get(f"{self.base_url}/workers", timeout=_limit(ABORT_TIMEOUT_S)) as response:
                if response.status == 404:
                    return [self.base_url]
                return [str(worker["url"]).rstrip("/") for worker in (await response.json())["workers"]]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as problem:
            raise EngineError(f"{self.base_url}/workers did not list its workers: {problem!r}") from problem

    async def drain(self) -> None:
        """Waits until every abort that was started in the background has been delivered (or given up)."""
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    async def close(self) -> None:
        """Delivers pending aborts, then closes the pool."""
        await self.drain()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _request(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        session_id: str | None,
        experts_from: int = 0,
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Payload and headers of a request that may be sent. Raises `RequestRejected`."""
        check_request(input_ids, sampling_params, self._vocab_size)
        params = {**sampling_params, "no_stop_trim": False}
        rid = uuid.uuid4().hex
        if self._experts is not None:
            # The engine takes a start up to the number of ids that it is given.
            rid += f"{ROUTED_EXPERTS_MARK}{min(max(experts_from, 0), len(input_ids))}"
        payload = {"rid": rid, "input_ids": list(input_ids), "sampling_params": params}
        return {**payload, "return_logprob": True}, {ROUTING_KEY_HEADER: session_id} if session_id else {}

    def _with_experts(
        self, generation: Generation, answer: Mapping[str, Any], payload: Mapping[str, Any], num_sampled: int
    ) -> Generation:
        """The last part of a request that sampled `num_sampled` tokens, with its routed experts if asked for."""
        if self._experts is None or not num_sampled:
            return generation
        start = int(payload["rid"].partition(ROUTED_EXPERTS_MARK)[2])
        total = len(payload["input_ids"]) + num_sampled
        return replace(generation, routed_experts=parse_experts(answer, self._experts, start=start, num_tokens=total))

    def _late(self, payload: Mapping[str, Any]) -> DeadlineExceeded:
        owner, what = f"request {payload['rid']}", f"{self.base_url}/generate"
        return DeadlineExceeded.waiting(owner=owner, for_what=what, limit_s=self._request_timeout_s)

    async def _post_with_retries(
        self, payload: dict[str, Any], headers: dict[str, str], scope: RequestScope | None, post: Post | None = None
    ) -> dict[str, Any] | None:
        """The engine's answer; None if the scope was aborted between two tries. `payload["rid"]` is the try's.

        `post`: sends one try, `_post` unless said otherwise.
        """
        retry_s, problem = FIRST_RETRY_S, "no try"
        for attempt in range(MAX_TRIES):
            if attempt:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
                if scope is not None and scope.aborted:
                    return None
                payload["rid"] = uuid.uuid4().hex + "".join(payload["rid"].partition(ROUTED_EXPERTS_MARK)[1:])
            try:
                status, body = await (post or self._post)(payload, headers, scope)
            except aiohttp.ClientError as broken:
                problem = f"{type(broken).__name__}: {broken}"
                if not isinstance(broken, aiohttp.ClientConnectorError):
                    self._abort_later([payload["rid"]])  # it may have reached the engine
                continue
            text = body[:300].decode(errors="replace")
            if status == 200:
                return decode(body)
            problem = f"HTTP {status}: {text}"
            if status in MAY_RUN_STATUSES:
                self._abort_later([payload["rid"]])
            if status == 500 and attempt > 0:
                break
            if status not in RETRY_STATUSES and status != 500:
                raise RequestRejected(
                    f"{self.base_url}/generate refused a request of {len(payload['input_ids'])} ids: {problem}"
                )
        raise EngineError(f"{self.base_url}/generate failed after {attempt + 1} tries; the last one said: {problem}")

    async def _post(
        self, payload: Mapping[str, Any], headers: Mapping[str, str], scope: RequestScope | None
    ) -> tuple[int, bytes]:
        """One try: status and body. The scope can abort it while it lasts."""
        rid = payload["rid"]
        if scope is not None:
            scope.rids.add(rid)
        try:
            async with self._get_session().post(f"{self.base_url}/generate", json=payload, headers=headers) as response:
                return response.status, await response.read()
        finally:
            if scope is not None:
                scope.rids.discard(rid)

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)  # the semaphore is the limit; aborts must not queue behind it
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), headers=self._headers
            )
        return self._session

    def _abort_later(self, rids: list[str]) -> None:
        task = asyncio.get_running_loop().create_task(self._abort(rids))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort(self, rids: Iterable[str]) -> None:
        """Tells every worker to abort these requests; a worker that does not know one ignores it. Never raises."""
        rids = list(rids)
        if not rids:
            return
        try:
            urls = await self.workers()
        except EngineError as problem:
            logger.warning("%d requests could not be aborted: %s", len(rids), problem)
            return
        await asyncio.gather(*(self._abort_one(url, rid) for url in urls for rid in rids))

    async def _abort_one(self, url: str, rid: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._get_session().post(
                f"{url}/abort_request",
                json={"rid": rid, "abort_all": rid == EVERY_REQUEST},
                timeout=_limit(ABORT_TIMEOUT_S),
            ):
                pass


def _limit(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


async def _event(content: aiohttp.StreamReader) -> bytes:
    """The next event of a stream, as JSON."""
    while line := await content.readline():
        if line.startswith(b"data:") and b"[DONE]" not in line:
            return line[5:]
    raise aiohttp.ClientPayloadError("it ended without a finish reason")
