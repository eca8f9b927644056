"""`EnginePool`: the engines that requests may go to, which of them gets the next one, and what each is working on.

Consumes: addresses from whoever watches over the engines (`admit`, `dismiss`), requests that ask for a place
(`acquire`), and news of their tries (`heard`, `failed`, `release`). Produces: a `Try`, a place at one engine. A request
waits for an open gate and an engine with room, within `wait_limit_s` while no engine can be reached; it is woken by a
place that becomes free, an engine that is admitted or answers again, the gate, or `wake_all`. One task looks now and
then for tries without progress; it ends when there is nothing to watch. All on one event loop.

Invariants
1. An engine has at most `most_per_engine` tries. One that could not be reached has at most one, which finds out.
2. The requests of a session go to one engine as long as that lives; those of a prompt too, as long as its load is near
   the least: their common prefix is then in its cache. All others go to the engine with the least load.
3. A dismissed engine gets no more requests, and its tries are interrupted at once. Admitted again it is a new engine.
4. Time without progress counts from the last token of a try; while it is silent, from the last token of its engine, as
   long as the try may be queueing there: no later request of its engine has been served since.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import TypeVar

from slime.core.errors import DeadlineExceeded
from slime.rollout.scope import RequestScope

T = TypeVar("T")
LATE, DISMISSED, PAUSED = "late", "dismissed", "paused"
"""Why a try is interrupted."""
FIRST_COOLDOWN_S, LONGEST_COOLDOWN_S = 0.25, 4.0
"""How long an engine that could not be reached is left alone."""
NEAR = 16
"""Requests that an engine may have more than the least loaded one, and still get those whose prompt it knows."""
REMEMBERED = 1 << 18
"""Sessions and prompts whose engine is remembered."""
LOOKS = 8
"""Looks at the tries within one limit."""


class Interrupted(Exception):
    """A try was ended from outside; `why` is one of the words above."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Engine:
    """One engine as its client sees it."""

    __slots__ = ("admitted", "asked", "down_until", "failures", "progress_at", "served", "tries", "url", "waiting")

    def __init__(self, url: str, now: float) -> None:
        self.url = url
        self.tries: set[Try] = set()
        self.waiting: dict[asyncio.Future[None], None] = {}
        """Requests of its sessions, in the order in which they came."""
        self.admitted, self.failures, self.down_until = True, 0, 0.0
        self.asked = 0
        """Requests that it was sent."""
        self.served = -1
        """The latest of them that has got a token."""
        self.progress_at = now


class Try:
    """One request at one engine."""

    __slots__ = (
        "_fresh_at",
        "_guard",
        "_number",
        "_place",
        "_served",
        "engine",
        "heard_at",
        "interrupted",
        "rid",
        "scope",
    )

    def __init__(self, engine: Engine, rid: str, scope: RequestScope | None, now: float) -> None:
        self.engine, self.rid, self.scope = engine, rid, scope
        self.interrupted: str | None = None
        self._guard: asyncio.Timeout | None = None
        self.heard_at = self._fresh_at = now
        self._number = self._place = engine.asked
        self._served = False
        engine.asked += 1

    def got_tokens(self, now: float) -> None:
        """Tokens have come. If it falls silent now it may have been sent to the end of the queue."""
        engine = self.engine
        self.heard_at = engine.progress_at = now
        self._place = engine.asked - 1
        if not self._served:
            self._served, engine.served = True, max(engine.served, self._number)

    def silent_s(self, now: float) -> float:
        """Seconds without progress (invariant 4), as far as somebody waits for it."""
        if self._guard is None:
            self._fresh_at = now
        overtaken = self.engine.served > self._place
        self._fresh_at = max(self._fresh_at, self.heard_at, 0.0 if overtaken else self.engine.progress_at)
        return now - self._fresh_at

    def interrupt(self, why: str) -> None:
        """Ends the wait for its engine, now or the next one: `wait` raises `Interrupted`."""
        if self.interrupted is None:
            self.interrupted = why
            if self._guard is not None:
                self._guard.reschedule(0.0)

    async def wait(self, what: Callable[[], Awaitable[T]]) -> T:
        """What the engine answers. Raises `Interrupted`, and what `what` raises."""
        if self.interrupted is None:
            try:
                async with asyncio.timeout(None) as self._guard:
                    return await what()
            except TimeoutError:
                if self.interrupted is None:
                    raise
            finally:
                self._guard = None
        raise Interrupted(self.interrupted)


class EnginePool:
    """See the module's text. `admit` and `dismiss` are for the event loop on which requests run."""

    def __init__(
        self, urls: Iterable[str], *, most_per_engine: int, silence_limit_s: float, wait_limit_s: float
    ) -> None:
        """`silence_limit_s`: of a try; `wait_limit_s`: of the time in which no engine can be reached."""
        self._most, self._silence_limit_s, self._wait_limit_s = most_per_engine, silence_limit_s, wait_limit_s
        self._engines: dict[str, Engine] = {}
        self._homes: OrderedDict[Hashable, Engine] = OrderedDict()
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._open = True
        self._alone_since: float | None = None
        """Since when no engine can be reached and somebody wants one."""
        self._watch: asyncio.Task[None] | None = None
        self._first = [_plain(url) for url in urls]
        """Admitted when the event loop runs."""

    @property
    def engines(self) -> list[Engine]:
        """Those that are admitted."""
        self._begin()
        return list(self._engines.values())

    @property
    def tries(self) -> list[Try]:
        """All that are with an engine."""
        return [one for engine in self._engines.values() for one in engine.tries]

    @property
    def is_open(self) -> bool:
        """Whether requests get places."""
        return self._open

    def admit(self, urls: Iterable[str]) -> None:
        """Requests may go to these engines, also those that wait. Ones that are known stay as they are."""
        self._begin()
        for url in map(_plain, urls):
            if url not in self._engines:
                self._engines[url] = Engine(url, _now())
        self.wake_all()

    def dismiss(self, urls: Iterable[str]) -> list[str]:
        """No request goes to these engines any more, and those that they have are interrupted.

        Returns the ones that were known.
        """
        self._begin()
        gone = [engine for url in dict.fromkeys(map(_plain, urls)) if (engine := self._engines.pop(url, None))]
        for engine in gone:
            engine.admitted = False
            for one in list(engine.tries):
                one.interrupt(DISMISSED)
            _wake(engine.waiting)
        return [engine.url for engine in gone]

    def set_engines(self, urls: Iterable[str]) -> list[str]:
        """Exactly these engines are admitted. Returns those that were dismissed for it."""
        self._begin()
        wanted = [_plain(url) for url in urls]
        self.admit(wanted)
        return self.dismiss(self._engines.keys() - set(wanted))

    def close_gate(self) -> None:
        """No request gets a place until `open_gate`."""
        self._open = False

    def open_gate(self) -> None:
        """Requests get places again."""
        self._open = True
        self.wake_all()

    def wake_all(self) -> None:
        """Whoever waits looks again."""
        for queue in (self._waiting, *(engine.waiting for engine in self._engines.values())):
            _wake(queue)

    async def acquire(
        self,
        rid: str,
        *,
        session: str | None,
        prompt: Hashable,
        scope: RequestScope | None,
        is_over: Callable[[], bool],
    ) -> Try | None:
        """A place for a request; None as soon as `is_over`. Raises `DeadlineExceeded` if no engine can be reached."""
        self._begin()
        while not is_over():
            home = self._home(session) if session else None
            engine = self._choose(home, prompt) if self._open else None
            if engine is not None:
                for key in (session, prompt) if session else (prompt,):
                    self._remember(key, engine)
                one = Try(engine, rid, scope, _now())
                engine.tries.add(one)
                if scope is not None:
                    scope.tries.add(one)
                self._look_after()
                return one
            await self._wait(self._waiting if home is None else home.waiting)
        return None

    def release(self, one: Try) -> None:
        """A try has ended: its place is free."""
        engine = one.engine
        engine.tries.discard(one)
        if one.scope is not None:
            one.scope.tries.discard(one)
        _wake(engine.waiting or self._waiting, 1)

    def heard(self, engine: Engine) -> None:
        """It answers."""
        if engine.failures:
            engine.failures = 0
            self.wake_all()

    def failed(self, engine: Engine) -> None:
        """It could not be reached, or broke off."""
        now = _now()
        if now < engine.down_until:
            return  # tries that broke with it
        cooldown_s = min(FIRST_COOLDOWN_S * 2**engine.failures, LONGEST_COOLDOWN_S)
        engine.failures += 1
        engine.down_until = now + cooldown_s
        _wake(engine.waiting)
        asyncio.get_running_loop().call_later(cooldown_s + 0.001, self.wake_all)

    def _begin(self) -> None:
        first, self._first = self._first, []
        if first:
            self.admit(first)

    def _home(self, key: Hashable) -> Engine | None:
        engine = self._homes.get(key)
        return engine if engine is not None and engine.admitted and not engine.failures else None

    def _choose(self, home: Engine | None, prompt: Hashable) -> Engine | None:
        """An engine with room; None if there is none, or not in the home of the session."""
        if home is not None:
            return home if len(home.tries) < self._most else None
        now = _now()
        free = [engine for engine in self._engines.values() if self._has_room(engine, now)]
        if not free:
            return None
        least = min(free, key=lambda engine: (engine.failures, len(engine.tries)))
        near = self._home(prompt)
        most = min(self._most, len(least.tries) + NEAR)
        return near if near is not None and len(near.tries) < most and not least.failures else least

    def _has_room(self, engine: Engine, now: float) -> bool:
        if engine.failures:
            return not engine.tries and now >= engine.down_until
        return len(engine.tries) < self._most

    def _remember(self, key: Hashable, engine: Engine) -> None:
        self._homes[key] = engine
        self._homes.move_to_end(key)
        if len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)

    async def _wait(self, queue: dict[asyncio.Future[None], None]) -> None:
        waiter = asyncio.get_running_loop().create_future()
        queue[waiter] = None
        self._look_after()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                _wake(queue or self._waiting, 1)  # it was meant for somebody who does not want it
            raise
        finally:
            queue.pop(waiter, None)

    # ---- the watch -------------------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watching(), name="engine-pool-watch")

    async def _watching(self) -> None:
        """Interrupts tries without progress, and ends the wait for engines that do not come."""
        limits = (self._silence_limit_s, self._wait_limit_s)
        every_s = min(max(min(limits) / LOOKS, 0.02), 5.0)
        while (tries := self.tries) or self._waiting or any(e.waiting for e in self._engines.values()):
            now = _now()
            for one in tries:
                if one.silent_s(now) > self._silence_limit_s:
                    one.interrupt(LATE)
            if any(not engine.failures for engine in self._engines.values()) or not self._waiting:
                self._alone_since = None
            elif self._alone_since is None:
                self._alone_since = now
            elif now - self._alone_since > self._wait_limit_s:
                self._give_up()
            await asyncio.sleep(every_s)
        self._alone_since = None

    def _give_up(self) -> None:
        known = ", ".join(self._engines) or "none is admitted"
        for waiter in list(self._waiting):
            if not waiter.done():
                waiter.set_exception(
                    DeadlineExceeded.waiting(
                        owner="a request",
                        for_what="an engine that can be reached (--engine-wait-s)",
                        limit_s=self._wait_limit_s,
                        last_progress=known,
                    )
                )

    async def close(self) -> None:
        """Ends the watch."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None


def _wake(queue: dict[asyncio.Future[None], None], most: int | None = None) -> None:
    """Lets the first `most` who wait look again, or all."""
    for waiter in list(queue) if most is None else _first(queue, most):
        queue.pop(waiter)
        if not waiter.done():
            waiter.set_result(None)


def _first(queue: dict[asyncio.Future[None], None], most: int) -> list[asyncio.Future[None]]:
    return [waiter for _, waiter in zip(range(most), queue, strict=False)]


def _plain(url: str) -> str:
    return url.rstrip("/")


def _now() -> float:
    return asyncio.get_running_loop().time()
