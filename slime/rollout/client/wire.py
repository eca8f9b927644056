"""HTTP to engines: requests whose answer is a stream of events, and orders to end requests.

Consumes: payloads and addresses. Produces: `Events`, and aborts that have been delivered or given up. A request waits
in its caller; aborts wait for nobody: a background task per engine delivers them, several at a time, and `drain` waits
for those. All on one event loop.

Invariants
1. An abort goes to the engine that has the request, and to no other.
2. Aborts never wait for a free connection, and an engine that cannot be reached costs one attempt, not one a request.
3. Requests whose ids begin alike are ended together, whatever their number, and with them no other. SGLang 0.5.16 ends
   all whose ids begin with the one that it is sent, but drops an abort if that id is not itself one of a request. So a
   request with that id, the marker, is sent first and ended with the others; that it was says that they were, too.
4. No request that is to go on has an id that begins with that of a marker: SGLang sends itself an abort of each request
   two seconds after its answer, and with several tokenizer workers it looks whether there is one only later.
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

ABORT_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 10.0
"""An engine on this host or a near one accepts at once; a host that is gone never does."""
ABORTS_AT_ONCE = 32
END_TIMEOUT_S = 1.0
"""A connection whose answer does not end in this time is closed instead of used again."""
EVERYTHING = ""
"""Stands for the ids of all requests of an engine, whoever sent them."""
MARKERS = 3
"""Sent at most: one ends by itself if its abort comes too late. Then, or if it is refused, each request is ended."""
MARKER_TOKENS = 64
"""A marker is ended long before it has so many."""
REFUSED = re.compile(rb'"status_code":\s*\d')
"""In the abort of a request that its engine turned down, as one of a pair does with a request that names no other."""
MARKER_REPEAT_S = 0.25
"""Its abort can overtake it on the way to the engine."""


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

    def __init__(self, keys: EngineKeys) -> None:
        """`keys`: what the engines ask for; aborts are control."""
        self._headers = {"Content-Type": "application/json"}
        if keys.use:
            self._headers["Authorization"] = f"Bearer {keys.use}"
        self._control = {"Authorization": f"Bearer {keys.control}"} if keys.control else {}
        self._session: aiohttp.ClientSession | None = None
        self._to_abort: dict[str, dict[str, list[str] | None]] = {}
        """Address -> ids whose abort waits to be delivered, in order; and with what they begin -> those known."""
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

    def abort(self, url: str, rid: str = EVERYTHING) -> asyncio.Task[None] | None:
        """Has the engine end a request, or all that it has, in the background; it ignores one it does not know.

        Returns the task that delivers it; None after `close`, when nothing is sent any more.
        """
        return self._order(url, rid, None)

    def abort_together(self, url: str, prefix: str, rids: Iterable[str]) -> asyncio.Task[None] | None:
        """Has the engine end all requests whose ids begin with `prefix`, in the background; `rids`: those known.

        Returns as `abort` does.
        """
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
            del self._delivering[url]  # in the turn in which nothing was left: an abort after it starts another task

    async def _abort_together(self, url: str, prefix: str) -> bool:
        """Invariant 3. Whether it has worked, or is given up, because the engine cannot be reached in time."""
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
        """Its answer; None if the engine cannot be reached any more."""
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
        """Whether the engine could be reached."""
        body = orjson.dumps({"rid": rid, "abort_all": rid == EVERYTHING})
        limit = aiohttp.ClientTimeout(total=ABORT_TIMEOUT_S)
        try:
            async with self._open().post(f"{url}/abort_request", data=body, timeout=limit, headers=self._control):
                return True
        except (aiohttp.ClientConnectorError, TimeoutError):
            return False
        except aiohttp.ClientError:
            return True
