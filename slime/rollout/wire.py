"""HTTP to engines: requests whose answer is a stream of events, and orders to end requests.

Consumes: payloads and addresses. Produces: `Events`, and aborts that have been delivered or given up. A request waits
in its caller; aborts wait for nobody: a background task per engine delivers them, several at a time, and `drain` waits
for those. All on one event loop.

Invariants
1. An abort goes to the engine that has the request, and to no other; the end of everything is one message.
2. Aborts never wait for a free connection, and an engine that cannot be reached costs one attempt, not one a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from slime.core.errors import EngineError

ABORT_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 10.0
"""An engine on this host or a near one accepts at once; a host that is gone never does."""
ABORTS_AT_ONCE = 32
END_TIMEOUT_S = 1.0
"""A connection whose answer does not end in this time is closed instead of used again."""
EVERYTHING = ""
"""Stands for the ids of all requests of an engine."""


class Events:
    """The events of an answer, as they come."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        self._rest, self._seen = bytearray(), 0

    async def next(self) -> list[dict[str, Any]]:
        """All events that have come since. Raises `EngineError` if one is not JSON, `ClientError` if no more come."""
        while True:
            chunk = await self._content.readany()
            if not chunk:
                raise aiohttp.ClientPayloadError("it ended without a finish reason")
            self._rest += chunk
            end = self._rest.rfind(b"\n\n", self._seen)
            if end < 0:
                self._seen = max(0, len(self._rest) - 1)
                continue
            whole, self._rest, self._seen = bytes(self._rest[:end]), self._rest[end + 2 :], 0
            events = [decode(line[5:]) for line in whole.split(b"\n\n") if line.startswith(b"data:") and _says(line)]
            if events:
                return events


def _says(line: bytes) -> bool:
    return not line.endswith(b"[DONE]")


def allow_many_connections() -> None:
    """Each request under way is an open file: raises this process's limit of them as far as it may go."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def collect_garbage_rarely() -> None:
    """Python looks at all objects again and again while thousands of requests are made: seconds in which nothing runs.

    What there is now is never looked at again, and the rest when much more has come.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 1000, 100)


def decode(body: bytes) -> dict[str, Any]:
    """The answer to one prompt, or a part of it. Raises `EngineError` if it is none."""
    try:
        answer = orjson.loads(body)
    except ValueError as problem:
        raise EngineError(f"got an answer of {len(body)} bytes that is not JSON: {body[:100]!r}") from problem
    if not isinstance(answer, dict):
        raise EngineError(f"got a {type(answer).__name__} as answer to one prompt; expected an object")
    return answer


class Wire:
    """Connections to engines, and the aborts under way. `close` at the end."""

    def __init__(self, api_key: str | None) -> None:
        """`api_key`: the bearer token that the engines ask for."""
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None
        self._to_abort: dict[str, dict[str, None]] = {}
        """Address -> ids whose abort waits to be delivered, in order."""
        self._delivering: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    async def post(self, url: str, payload: Mapping[str, Any]) -> aiohttp.ClientResponse:
        """Sends a request and returns when status and headers are there. Raises `aiohttp.ClientError`."""
        return await self._open().post(url, data=orjson.dumps(payload))

    async def finish(self, response: aiohttp.ClientResponse) -> None:
        """The last event has come: reads the end of the answer, so that the connection can be used again."""
        response.content.read_nowait(-1)
        if response.content.at_eof():
            return
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                while await response.content.readany():
                    pass
        except (TimeoutError, aiohttp.ClientError):
            response.close()

    def abort(self, url: str, rid: str = EVERYTHING) -> None:
        """Has the engine end a request, or all that it has, in the background; it ignores one it does not know.

        Nothing is sent any more after `close`.
        """
        if self._closed:
            return
        self._to_abort.setdefault(url, {})[rid] = None
        if url not in self._delivering:
            task = asyncio.get_running_loop().create_task(self._deliver(url), name=f"aborts {url}")
            self._delivering[url] = task

    async def drain(self) -> None:
        """Waits until every abort has been delivered (or given up)."""
        while self._delivering:
            await asyncio.gather(*self._delivering.values(), return_exceptions=True)
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Delivers pending aborts, then closes the connections."""
        await self.drain()
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)  # places at engines are the limit; aborts must not queue
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self._session

    async def _deliver(self, url: str) -> None:
        try:
            while waiting := self._to_abort.pop(url, None):
                rids = [EVERYTHING] if EVERYTHING in waiting else list(waiting)
                for begin in range(0, len(rids), ABORTS_AT_ONCE):
                    some = rids[begin : begin + ABORTS_AT_ONCE]
                    if not all(await asyncio.gather(*(self._abort(url, rid) for rid in some))):
                        break
        finally:
            del self._delivering[url]  # in the turn in which nothing was left: an abort after it starts another task

    async def _abort(self, url: str, rid: str) -> bool:
        """Whether the engine could be reached."""
        body = orjson.dumps({"rid": rid, "abort_all": rid == EVERYTHING})
        limit = aiohttp.ClientTimeout(total=ABORT_TIMEOUT_S)
        try:
            async with self._open().post(f"{url}/abort_request", data=body, timeout=limit):
                return True
        except (aiohttp.ClientConnectorError, TimeoutError):
            return False
        except aiohttp.ClientError:
            return True
