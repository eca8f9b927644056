"""`PairPool`: engines in pairs. A prefill engine processes the prompt and transfers its KV cache to a decode engine,
which streams the completion.

`PairPool` is the pool of decode engines and contains a pool of prefill engines. `acquire` returns an attempt at a
decode engine, with an attempt at a prefill engine as its `reader`; `begin` sends the reader's request in a task that
ends on the prefill engine's response, an interruption or the pair's release. Everything runs on one event loop.

Invariants
1. A request has a slot and an id at each of the two engines, and is aborted at both.
2. The reader's slot is freed once the prompt is processed or the request no longer needs it.
3. If prefill fails, the request is interrupted and retried as if its decode engine had failed. After the first token,
   failures of the reader are ignored.
4. The two engines match their requests by a unique random number.
5. Requests of a session or prompt share a prefill engine, to use its cache. The decode engine is chosen by load alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import aiohttp

from slime.core.errors import EngineError
from slime.core.topology import bootstrap_of
from slime.rollout.client.call import Refused, refuse
from slime.rollout.client.engine_pool import EnginePool
from slime.rollout.client.retries import UNREACHABLE_STATUSES
from slime.rollout.client.upstream import ABORTED, UNREAD, Interrupted, RequestScope, Try, Upstream
from slime.rollout.client.wire import Events, Wire

ROOM_BITS = 63
"""Bits of the random number that matches the two requests; SGLang stores it in a signed 64-bit integer."""


class PairPool(EnginePool):
    def __init__(self, wire: Wire, **limits: Any) -> None:
        """`limits`: the limits of both pools (see `EnginePool`)."""
        super().__init__((), wanted="a decode engine", **limits)
        self._readers = EnginePool((), wanted="a prefill engine", **limits)
        self._wire = wire
        self._reading: dict[Try, asyncio.Task[None]] = {}
        """Reader -> the task that sends its request."""

    @property
    def upstreams(self) -> list[Upstream]:
        return [*super().upstreams, *self._readers.upstreams]

    @property
    def tries(self) -> list[Try]:
        return [*super().tries, *self._readers.tries]

    def admit(self, urls: Iterable[str], *, prefill: bool = False) -> None:
        if prefill:
            self._readers.admit(urls)
        else:
            super().admit(urls)

    def dismiss(self, urls: Iterable[str], *, died: bool = False) -> list[Upstream]:
        urls = list(urls)
        gone = super().dismiss(urls, died=died)
        if gone:
            self._readers.wake_all()  # requests at a dismissed decode engine no longer need a reader
        return [*gone, *self._readers.dismiss(urls, died=died)]

    def close_gate(self) -> None:
        super().close_gate()
        self._readers.close_gate()

    def open_gate(self) -> None:
        self._readers.open_gate()
        super().open_gate()

    def wake_all(self) -> None:
        super().wake_all()
        self._readers.wake_all()

    def failed(self, upstream: Upstream) -> None:
        super().failed(upstream)
        self._readers.failed(upstream)

    async def acquire(
        self, *, session: str | None, prompt: Hashable, scope: RequestScope | None, is_over: Callable[[], bool]
    ) -> Try | None:
        while (one := await super().acquire(session=None, prompt=None, scope=scope, is_over=is_over)) is not None:
            try:
                one.reader = await self._readers.acquire(
                    session=session, prompt=prompt, scope=scope, is_over=self._gives_up(one, is_over)
                )
            finally:
                if one.reader is None:
                    self.release(one)
            if one.reader is not None:
                one.reader.beside = one.upstream
                return one
        return None

    def begin(self, one: Try, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        reader = one.reader
        assert reader is not None, "a pair must have a reader"
        host, port = bootstrap_of(reader.upstream.url)
        meeting = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": secrets.randbits(ROOM_BITS)}
        payload = {**payload, **meeting}
        task = asyncio.create_task(self._read(one, reader, {**payload, "rid": reader.rid}), name=f"read {reader.rid}")
        self._reading[reader] = task
        task.add_done_callback(lambda _: self._has_read(reader))
        return payload

    def release(self, one: Try) -> None:
        super().release(one)
        reader = one.reader
        if reader is None:
            return
        task = self._reading.get(reader)
        if task is None:
            self._readers.release(reader)
        elif not one.has_tokens:  # after a token, the reader finishes on its own
            task.cancel()

    async def close(self) -> None:
        for task in (tasks := list(self._reading.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._readers.close()
        await super().close()

    def _gives_up(self, one: Try, is_over: Callable[[], bool]) -> Callable[[], bool]:
        """Returns a function that says whether the request should stop waiting for a reader."""
        return lambda: is_over() or one.interrupted is not None or not self.is_open

    def _has_read(self, reader: Try) -> None:
        del self._reading[reader]
        self._readers.release(reader)

    async def _read(self, one: Try, reader: Try, payload: Mapping[str, Any]) -> None:
        """Sends the reader's request. Interrupts the attempt at the decode engine if prefill fails."""
        runs, upstream = True, reader.upstream
        try:
            response = await reader.wait(lambda: self._wire.post(f"{upstream.url}/generate", payload))
            try:
                if response.status not in UNREACHABLE_STATUSES:
                    self._readers.heard(upstream)
                if response.status != 200:
                    raise Refused(response.status, (await reader.wait(response.read))[:300].decode(errors="replace"))
                aborted = await _end_of(reader, Events(response))
                runs = False
                await self._wire.finish(response)
            finally:
                response.release()
            if aborted:
                raise Interrupted(ABORTED)
            reader.got_tokens(asyncio.get_running_loop().time())
            self._readers.heard(upstream)
            one.reader = None
        except (Interrupted, aiohttp.ClientError, TimeoutError, Refused, EngineError) as problem:
            runs = runs and not isinstance(problem, aiohttp.ClientConnectorError)
            reader.trouble = problem
            if not one.has_tokens:
                one.interrupt(UNREAD)
                one.break_off()
        finally:
            if runs and upstream.admitted:
                self._wire.abort(upstream.url, reader.rid)


async def _end_of(reader: Try, events: Events) -> bool:
    """Reads events to the end. Returns whether the request was aborted. Raises `Refused` if the engine refused it."""
    while True:
        for event in await reader.wait(events.next):
            refuse(event)
            finish = (event.get("meta_info") or {}).get("finish_reason")
            if finish:
                return finish.get("type") == "abort"
