"""`Wire`: sends HTTP requests and aborts to engines. `Events`: the event stream of a response.

Callers do not wait for aborts: one background task per engine delivers them, several at a time, and `drain` waits for
these tasks. Everything runs on one event loop.

Invariants
1. An abort goes only to the engine that runs the request.
2. Aborts never wait for a free connection. An unreachable engine costs one attempt, not one per request.
3. All requests whose ids share a prefix, and only those, can be aborted together. SGLang 0.5.16 aborts every request
   whose id begins with the given id, but ignores the abort if no request has exactly that id. So the client first sends
   a marker, a dummy request with the prefix as its id, and aborts that id. When the marker ends, the others have ended.
4. A request that must keep running never has an id that begins with a marker's id: SGLang also aborts each request two
   seconds after its response, and with several tokenizer workers it checks only later whether the request exists.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import resource
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp
import orjson

from slime.core.errors import EngineError
from slime.core.text import EngineKeys
from slime.rollout.client.upstream import Load

ABORT_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 10.0
"""A reachable engine accepts a connection immediately; a host that no longer exists never does."""
KEEPALIVE_S = 2.0
"""How long an idle connection is kept. SGLang closes it after 5 s, and a request sent at that moment would fail as if
the engine had died."""
LOAD_TIMEOUT_S = 10.0
ABORTS_AT_ONCE = 32
END_TIMEOUT_S = 1.0
"""If a response does not end within this time, its connection is closed instead of reused."""
EVERYTHING = ""
"""Stands for the ids of all requests of an engine, from any client."""
MARKERS = 3
"""How many markers to try, because a marker may end before its abort arrives. If the last one also fails or a marker is
refused, the requests are aborted one by one.
"""
MARKER_TOKENS = 64
"""Maximum number of tokens of a marker, which is normally aborted long before it has that many."""
REFUSED = re.compile(rb'"status_code":\s*\d')
"""Matches a response that rejects the request, as paired engines do if it has no partner."""
MARKER_REPEAT_S = 0.25
"""How often (s) the abort is repeated, because it can overtake its marker on the way to the engine."""


class Events:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        self._rest, self._seen = bytearray(), 0

    async def next(self) -> list[dict[str, Any]]:
        """Waits for the next events. Raises `EngineError` if one is not JSON, and `ClientError` if the stream ends."""
        while True:
            chunk = await self._content.readany()
            if not chunk:
                raise aiohttp.ClientPayloadError("the stream ended without a finish reason")
            self._rest += chunk
            end = self._rest.rfind(b"\n\n", self._seen)
            if end < 0:
                self._seen = max(0, len(self._rest) - 1)
                continue
            whole, self._rest, self._seen = bytes(self._rest[:end]), self._rest[end + 2 :], 0
            lines = [
                line for line in whole.split(b"\n\n") if line.startswith(b"data:") and not line.endswith(b"[DONE]")
            ]
            events = [decode(line[5:]) for line in lines]
            if events:
                return events


def allow_many_connections() -> None:
    """Raises the open-file limit, because each running request holds a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def collect_garbage_rarely() -> None:
    """Makes Python's garbage collector run rarely.

    In a process with thousands of requests, a full collection would stall the process for seconds. Existing objects are
    never scanned again, and new ones rarely.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 1000, 100)


def decode(body: bytes) -> dict[str, Any]:
    """Parses a JSON object from a response body or event. Raises `EngineError`."""
    try:
        answer = orjson.loads(body)
    except ValueError as problem:
        raise EngineError(f"the response of {len(body)} bytes is not JSON: {body[:100]!r}") from problem
    if not isinstance(answer, dict):
        raise EngineError(f"the response to one prompt is a {type(answer).__name__}, but must be a JSON object")
    return answer


class Wire:
    """Manages connections to engines and pending aborts. Call `close` at the end."""

    def __init__(self, keys: EngineKeys) -> None:
        """`keys`: API keys; aborts use the control key."""
        self._headers = {"Content-Type": "application/json"}
        if keys.use:
            self._headers["Authorization"] = f"Bearer {keys.use}"
        self._control = {"Authorization": f"Bearer {keys.control}"} if keys.control else {}
        self._session: aiohttp.ClientSession | None = None
        self._to_abort: dict[str, dict[str, list[str] | None]] = {}
        """Address -> id to abort -> None, or for a prefix, the known ids that begin with it."""
        self._delivering: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    async def post(self, url: str, payload: Mapping[str, Any]) -> aiohttp.ClientResponse:
        """Sends a request. Returns once status and headers have arrived. Raises `aiohttp.ClientError`."""
        return await self._open().post(url, data=orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY))

    async def load(self, url: str) -> Load:
        """Returns the load that an engine reports. Raises `EngineError`, `aiohttp.ClientError` or `TimeoutError`."""
        limit = aiohttp.ClientTimeout(total=LOAD_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        async with self._open().get(f"{url}/v1/loads?include=core,queues", timeout=limit) as answer:
            if answer.status != 200:
                raise EngineError(f"the engine refuses to report its load, with status {answer.status}")
            return Load.of(decode(await answer.read()))

    async def finish(self, response: aiohttp.ClientResponse) -> None:
        """Drains the response after the last event, so that the connection can be reused."""
        response.content.read_nowait(-1)
        if response.content.at_eof():
            return
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                while await response.content.readany():
                    pass
        except (TimeoutError, aiohttp.ClientError):
            response.close()

    def abort(self, url: str, rid: str = EVERYTHING) -> asyncio.Task[None] | None:
        """Aborts a request, or `EVERYTHING`, in the background. Engines ignore unknown ids.

        Returns the task that delivers the abort; None after `close`.
        """
        return self._order(url, rid, None)

    def abort_together(self, url: str, prefix: str, rids: Iterable[str]) -> asyncio.Task[None] | None:
        """Like `abort`, but for all requests whose ids begin with `prefix`. `rids`: the known ids."""
        return self._order(url, prefix, list(rids))

    def _order(self, url: str, rid: str, together: list[str] | None) -> asyncio.Task[None] | None:
        if self._closed:
            return None
        self._to_abort.setdefault(url, {})[rid] = together
        if url not in self._delivering:
            task = asyncio.get_running_loop().create_task(self._deliver(url), name=f"aborts {url}")
            self._delivering[url] = task
        return self._delivering[url]

    async def drain(self) -> None:
        while self._delivering:
            await asyncio.gather(*self._delivering.values(), return_exceptions=True)
            await asyncio.sleep(0)

    async def close(self) -> None:
        await self.drain()
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The engine pool limits requests; aborts must not queue.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self._session

    async def _deliver(self, url: str) -> None:
        try:
            while waiting := self._to_abort.pop(url, None):
                if EVERYTHING in waiting:
                    waiting = {EVERYTHING: None}
                alone = [rid for rid, together in waiting.items() if together is None]
                for prefix, together in waiting.items():
                    if together is not None and not await self._abort_together(url, prefix):
                        alone += together
                for begin in range(0, len(alone), ABORTS_AT_ONCE):
                    some = alone[begin : begin + ABORTS_AT_ONCE]
                    if not all(await asyncio.gather(*(self._abort(url, rid) for rid in some))):
                        break
        finally:
            del self._delivering[url]  # a later abort starts another task

    async def _abort_together(self, url: str, prefix: str) -> bool:
        """Aborts requests together (invariant 3). Returns False if they must be aborted one by one, and True if they
        have ended or the engine is unreachable.
        """
        params = {"max_new_tokens": MARKER_TOKENS, "ignore_eos": True}
        body = orjson.dumps({"rid": prefix, "input_ids": [0], "sampling_params": params, "stream": True})
        limit = aiohttp.ClientTimeout(total=ABORT_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        try:
            for _ in range(MARKERS):
                async with self._open().post(f"{url}/generate", data=body, timeout=limit) as marker:
                    if marker.status != 200:
                        return False
                    text = await self._end_marker(url, prefix, marker)
                    if text is not None and (b'"error"' in text or REFUSED.search(text)):
                        return False
                    if text is None or b'"abort"' in text:
                        return True
        except (aiohttp.ClientError, TimeoutError):
            return True
        return False

    async def _end_marker(self, url: str, prefix: str, marker: aiohttp.ClientResponse) -> bytes | None:
        """Aborts the marker and returns its response; None if the engine is no longer reachable."""
        answer = asyncio.ensure_future(marker.read())
        try:
            while not answer.done():
                if not await self._abort(url, prefix):
                    return None
                await asyncio.wait([answer], timeout=MARKER_REPEAT_S)
            return answer.result()
        finally:
            answer.cancel()

    async def _abort(self, url: str, rid: str) -> bool:
        body = orjson.dumps({"rid": rid, "abort_all": rid == EVERYTHING})
        limit = aiohttp.ClientTimeout(total=ABORT_TIMEOUT_S)
        try:
            async with self._open().post(f"{url}/abort_request", data=body, timeout=limit, headers=self._control):
                return True
        except (aiohttp.ClientConnectorError, TimeoutError):
            return False
        except aiohttp.ClientError:
            return True
