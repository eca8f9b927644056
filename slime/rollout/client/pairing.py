"""`PairPool`: places at engines that work in pairs. One reads the prompt (prefill) and hands keys and values over to
the one that samples (decode), whose stream is the answer.

It is the pool of the engines that sample, with another one inside of those that read. Consumes: what `EnginePool` does,
and the wire. Produces: a `Try` at an engine that samples whose `reader` is one at an engine that reads; `begin` sends
that one, in a task of its own. The task waits for its engine's answer; it is woken by that, by an interruption, and by
the release of its pair. All on one event loop.

Invariants
1. A request has one place at each of two engines, under an id of its own at each, and is ended at both: who ends all
   requests of a scope, or of an engine, finds it at either.
2. A place at the engine that reads is free again when the prompt has been read, or nobody wants it read any more.
3. A prompt that was not read interrupts the request that waits for it, which is sent again as if its own engine had
   failed so; once a token has come nothing that befalls the reader matters.
4. The two engines know each other's request by a number that no other one has.
5. Sessions and prompts that begin alike go to one reader, which has the cache; who samples is chosen by load alone.
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
from slime.rollout.client.engine_pool import UNREACHABLE_STATUSES, EnginePool
from slime.rollout.client.upstream import ABORTED, UNREAD, Interrupted, RequestScope, Try, Upstream
from slime.rollout.client.wire import Events, Wire

ROOM_BITS = 63
"""Of the number under which two engines know what one hands to the other; SGLang keeps it as a signed one of 64."""


class PairPool(EnginePool):
    """See the module's text."""

    def __init__(self, wire: Wire, *, most_per_engine: int, silence_limit_s: float, wait_limit_s: float) -> None:
        limits: dict[str, Any] = {
            "most_per_engine": most_per_engine,
            "silence_limit_s": silence_limit_s,
            "wait_limit_s": wait_limit_s,
        }
        super().__init__((), wanted="a decode engine", **limits)
        self._readers = EnginePool((), wanted="a prefill engine", **limits)
        self._wire = wire
        self._reading: dict[Try, asyncio.Task[None]] = {}
        """By the try at an engine that reads."""

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
            self._readers.wake_all()  # who has a place at one of these waits for no reader any more
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
        assert reader is not None, "a pair has two"
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
        elif not one.has_tokens:  # otherwise the reader is about to say that it is done
            task.cancel()

    async def close(self) -> None:
        for task in (tasks := list(self._reading.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._readers.close()
        await super().close()

    def _gives_up(self, one: Try, is_over: Callable[[], bool]) -> Callable[[], bool]:
        """Whether a place at an engine that samples is not kept for a reader any longer."""
        return lambda: is_over() or one.interrupted is not None or not self.is_open

    def _has_read(self, reader: Try) -> None:
        del self._reading[reader]
        self._readers.release(reader)

    async def _read(self, one: Try, reader: Try, payload: Mapping[str, Any]) -> None:
        """Has a prompt read; interrupts the request that waits for it if it was not."""
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
    """Whether an answer ended with an abort. Raises `Refused` if its engine turned the request down."""
    while True:
        for event in await reader.wait(events.next):
            refuse(event)
            finish = (event.get("meta_info") or {}).get("finish_reason")
            if finish:
                return finish.get("type") == "abort"
