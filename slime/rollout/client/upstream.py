"""`Upstream`, an engine as its client sees it, and `Try`, one request there.

Consumes: what the client hears of its requests (`got_tokens`), and what ends them from outside (`interrupt`). Produces:
what `wait` waits for, or `Interrupted`. A try waits for its engine; it is woken by the answer and by `break_off`.

Invariants
1. The id of a request begins with what is common to its client, its engine there, and its scope, and no id is the
   beginning of another. An engine ends all requests whose ids begin as it is asked to (`wire`): one, or all of a scope,
   or all that the client has there, and none of anybody else.
2. An engine that is admitted once more is another `Upstream`: the end of what it had ends nothing of what it gets.
3. Time without progress counts from the last token of a try; while it is silent, from the last token of its engine, as
   long as the try may be queueing there: no later request of its engine has been served since. While another engine
   reads its prompt it counts there, and from the last token of the engine that is to get it, which must have room.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from slime.rollout.client.engine_pool import EnginePool

# `RequestScope`: the requests of one rollout, wherever they are in user code, so that the run can end them together.
#
# Tasks inherit it through `REQUEST_SCOPE`. `client` puts the tries in it that run, and tells the execution of a request
# that was taken back (`transcript`). All on one event loop.


@dataclass(slots=True, eq=False)
class RequestScope:
    """The requests of one rollout. The run takes them back through it: their callers get `TakenBack`."""

    tries: set[Try] = field(default_factory=set)
    """Those that are with an engine now."""
    pools: set[EnginePool] = field(default_factory=set)
    """Those that its requests have asked for a place."""
    aborted: bool = False
    """Its requests are taken back, and no other is sent."""
    hands_back: bool = False
    """Its requests are taken back; others are sent after the pause."""

    number: int = field(default_factory=count(1).__next__)
    """Of this process; the ids of its requests hold it."""

    @property
    def rids(self) -> set[str]:
        """Ids of the requests that are with an engine now."""
        return {one.rid for one in self.tries}


REQUEST_SCOPE: ContextVar[RequestScope | None] = ContextVar("slime_request_scope", default=None)

T = TypeVar("T")
LATE, DISMISSED, DIED = "late", "dismissed", "died"
PAUSED, UNREAD, ABORTED = "paused", "unread", "aborted"
"""Why a try is interrupted. `DIED`: dismissed, because the engine has ended or hangs.
`UNREAD`: its `reader` has not read its prompt, and says why in `trouble`."""


class Interrupted(Exception):
    """A try was ended from outside; `why` is one of the words above."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Upstream:
    """One engine as its client sees it."""

    __slots__ = (
        "_busy_s",
        "_busy_since",
        "admitted",
        "admitted_at",
        "asked",
        "down_until",
        "failures",
        "prefix",
        "progress_at",
        "served",
        "stalls_at",
        "tries",
        "url",
        "waiting",
    )

    def __init__(self, url: str, prefix: str, now: float) -> None:
        """`prefix`: how the ids of all its requests begin."""
        self.url, self.prefix = url, prefix
        self.tries: set[Try] = set()
        self.waiting: dict[asyncio.Future[None], None] = {}
        """Requests of its sessions, in the order in which they came."""
        self.admitted, self.failures, self.down_until = True, 0, 0.0
        self.asked = 0
        """Requests that it was sent."""
        self.served = -1
        """The latest of them that has got a token."""
        self.admitted_at = self.progress_at = now
        self._busy_s, self._busy_since = 0.0, now
        self.stalls_at: float | None = None
        """When it was seen to have brought none of its requests a token for longer than one may be silent; None once it
        brings one.
        """

    def add(self, one: Try, now: float) -> None:
        """A try takes a place here."""
        if not self.tries:
            self._busy_since = now
        self.tries.add(one)

    def remove(self, one: Try, now: float) -> None:
        """A try gives its place back."""
        if one in self.tries:
            self.tries.remove(one)
            self._busy_s += 0.0 if self.tries else now - self._busy_since

    def take_busy_s(self, now: float) -> float:
        """Seconds since the last call in which it had a try."""
        if self.tries:
            self._busy_s, self._busy_since = self._busy_s + now - self._busy_since, now
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def prefix_of(self, scope: RequestScope | None) -> str:
        """How the ids of the requests of a scope begin, or of those that have none."""
        return f"{self.prefix}{0 if scope is None else scope.number}."


class Try:
    """One request at one engine."""

    __slots__ = (
        "_fresh_at",
        "_guard",
        "_number",
        "_place",
        "_served",
        "beside",
        "finds_out",
        "first_at",
        "heard_at",
        "interrupted",
        "placed_at",
        "reader",
        "rid",
        "scope",
        "trouble",
        "upstream",
    )

    def __init__(self, upstream: Upstream, scope: RequestScope | None, now: float) -> None:
        self.upstream, self.scope = upstream, scope
        self.interrupted: str | None = None
        self.reader: Try | None = None
        """Of engines in pairs: the try at the one that reads the prompt, until it has."""
        self.trouble: Exception | None = None
        """Of a reader: why it has not read."""
        self.beside: Upstream | None = None
        """Of a reader: the engine that samples, for whose room it may wait."""
        self._guard: asyncio.Timeout | None = None
        self.heard_at = self._fresh_at = self.placed_at = now
        self.first_at: float | None = None
        """When its first token came."""
        self._number = self._place = upstream.asked
        self.rid = f"{upstream.prefix_of(scope)}{self._number}."
        self.finds_out = upstream.failures > 0
        """Its engine could not be reached before; whether it can be now is not for this request to answer for."""
        self._served = False
        upstream.asked += 1

    @property
    def has_tokens(self) -> bool:
        """Whether one has come."""
        return self._served

    def got_tokens(self, now: float) -> None:
        """Tokens have come. If it falls silent now it may have been sent to the end of the queue."""
        upstream = self.upstream
        self.heard_at = upstream.progress_at = now
        upstream.stalls_at = None
        self._place = upstream.asked - 1
        if not self._served:
            self._served, upstream.served = True, max(upstream.served, self._number)
            self.first_at = now

    def silent_s(self, now: float) -> float:
        """Seconds without progress (invariant 3), as far as somebody waits for it."""
        if self._guard is None or self.reader is not None:
            self._fresh_at = now
        overtaken = self.upstream.served > self._place
        waits_at = [] if overtaken else [self.upstream]
        waits_at += [self.beside] if self.beside is not None else []
        self._fresh_at = max(self._fresh_at, self.heard_at, *(upstream.progress_at for upstream in waits_at))
        return now - self._fresh_at

    def interrupt(self, why: str) -> None:
        """Lets it wait for its engine no more, from its next `wait` on, or, with `break_off`, from now on."""
        self.interrupted = self.interrupted or why

    def break_off(self) -> None:
        """Wakes it, if it waits and was interrupted: `wait` raises `Interrupted`. A second time does nothing."""
        if self._guard is not None and self.interrupted is not None and self._guard.when() is None:
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


# Work in slices: the event loop does some of it in each turn, so that others get their turn.
#
# A thousand tasks that are woken at once all run in one turn, and nothing else runs until the last of them has.
# `Slices` makes many small calls, some in each turn: it consumes callables and waits for nothing. `Budget` lets tasks
# through as far as the work of a turn goes: a task waits in `take`, and is woken in its order by a later turn.

IN_ONE_TURN = 64
"""Calls of `Slices`."""


class Slices:
    """Use on one event loop."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self._due = False

    def add(self, work: Iterable[Callable[[], object]]) -> None:
        """Has these called from now on. None of them may raise."""
        self._work.extend(work)
        if self._work and not self._due:
            self._due = True
            self._turn()

    def _turn(self) -> None:
        try:
            for _ in range(min(IN_ONE_TURN, len(self._work))):
                self._work.popleft()()
        finally:  # one that raises after all costs nobody else his turn
            if self._work:
                asyncio.get_running_loop().call_soon(self._turn)
            else:
                self._due = False


class Budget:
    """Work that the tasks of an event loop may do in one of its turns."""

    def __init__(self, most: int) -> None:
        """`most`: of the unit that `take` counts; a task that wants more than that has a turn for itself."""
        self._most, self._used = most, 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._due = False

    async def take(self, amount: int) -> None:
        """Returns in a turn that has room for so much; those who asked before go first."""
        if self._waiting or self._used >= self._most:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append((waiter, amount))
            await waiter
        else:
            self._spend(amount)

    def _spend(self, amount: int) -> None:
        self._used += amount
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._due, self._used = False, 0
        while self._waiting and self._used < self._most:
            waiter, amount = self._waiting.popleft()
            if not waiter.done():  # nobody waits for one that was cancelled
                waiter.set_result(None)
                self._spend(amount)
