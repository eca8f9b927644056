"""`Upstream`: a client's view of an engine. `Try`: one attempt at an engine. `RequestScope`: the requests of a rollout.

An attempt waits for its engine in `wait` until the response or `break_off`. Everything runs on one event loop.

Invariants
1. A request id begins with a prefix for its client and engine, followed by a prefix for its scope. No id is a prefix of
   another id. One abort ends all requests with a common prefix (`wire`): a single request, the requests of a scope, or
   all requests of a client, but never requests of other clients.
2. An engine that is admitted again becomes a new `Upstream`, so that pending aborts for the old one do not end new
   requests.
3. The progress timer of an attempt restarts at each of its tokens. While the attempt may still be queued, that is,
   until the engine serves a later request, any token from the engine restarts the timer. During prefill, only the
   reader's timer runs; a token from the decode engine restarts it too, because the reader may be waiting for free
   memory there.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from slime.core.errors import EngineError

if TYPE_CHECKING:
    from slime.rollout.client.engine_pool import EnginePool


@dataclass(slots=True, eq=False)
class RequestScope:
    """The requests of one rollout, including those sent by user code. Tasks inherit the scope through `REQUEST_SCOPE`.

    The run cancels all requests of a scope together; their callers get `TakenBack`.
    """

    tries: set[Try] = field(default_factory=set)
    pools: set[EnginePool] = field(default_factory=set)
    """Pools in which requests of the scope have waited for a slot."""
    aborted: bool = False
    """Requests are cancelled, and no new ones are sent."""
    hands_back: bool = False
    """Requests are cancelled, but new ones are sent after the pause."""
    number: int = field(default_factory=count(1).__next__)
    """Unique in this process; part of the request ids."""


REQUEST_SCOPE: ContextVar[RequestScope | None] = ContextVar("slime_request_scope", default=None)

T = TypeVar("T")
LATE, DISMISSED, DIED = "late", "dismissed", "died"
PAUSED, UNREAD, ABORTED = "paused", "unread", "aborted"
"""Why an attempt is interrupted. `DIED`: its engine has died or is hanging. `UNREAD`: prefill failed; see `trouble`."""


class Interrupted(Exception):
    """An attempt was interrupted; `why` is one of the constants above."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


# ---- the number of requests that an engine can use (`--rollout-concurrency adaptive`) -------------------------------

START = 32
"""Limit of an engine that has not reported yet."""
PERSISTS = 2
"""Successive reports with a queue that lower the limit. New requests wait for the next prefill, so one is normal."""
LOWEST_SHARE, AFTER_RETRACTION = 0.5, 0.9
"""Smallest fraction to which one report lowers a limit. Fraction to which it is lowered if the engine retracts requests
but has none in its queue."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine reports about itself. With DP attention, sums and the highest use of all its groups."""

    at: float
    """When the engine wrote it, on its own clock. Reports with the same time are the same report."""
    running: int
    queued: int
    """Requests that the engine has accepted but does not run, including retracted ones."""
    retracted: int
    """Requests that it stopped running to free memory, since its previous figures."""
    kv_use: float
    """Fraction of the KV cache that running requests use."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Load:
        """Reads the answer of SGLang's `/v1/loads`. Raises `EngineError` if it has another form."""
        try:
            groups = answer["loads"]
            return cls(
                at=max(float(one["timestamp"]) for one in groups),
                running=sum(int(one["num_running_reqs"]) for one in groups),
                queued=sum(int(one["num_waiting_reqs"]) for one in groups),
                retracted=sum(int(one.get("queues", {}).get("retracted", 0)) for one in groups),
                kv_use=max(float(one["token_usage"]) for one in groups),
            )
        except (KeyError, TypeError, ValueError) as problem:
            raise EngineError(f"the engine's report of its load has another form: {problem!r}") from problem


class Concurrency:
    """The limit on one client's requests at one engine, which follows the load that the engine reports. Pure.

    Invariants
    1. The limit is at least 1 and at most `most`.
    2. It rises only if requests needed more, the engine has no queue, and its KV use is below the bound: twofold before
       the first queue, then by 1, 2, 3, ... until it falls again.
    3. It falls if requests queue in `PERSISTS` successive reports, to the fraction of requests that the engine runs, or
       if the engine retracts requests. As several clients of an engine rise by the same number and fall by the same
       fraction, their limits become equal.
    4. While more requests than the limit are in flight, it stays, because they show what the old limit did.
    """

    def __init__(self, most: int, *, max_kv_use: float) -> None:
        self._level = float(min(START, most))
        """The limit before it is rounded down. Otherwise, small limits would fall by larger fractions."""
        self._most, self._max_kv_use = most, max_kv_use
        self._rise = 1
        self._seen_at = -math.inf
        self._num_queues = 0
        """Successive reports with a queue."""
        self._is_starting = True

    @property
    def limit(self) -> int:
        return int(self._level)

    def take(self, load: Load, *, in_flight: int, is_needed: bool) -> bool:
        """Takes a report; ignores one that it knows. Returns whether it was new.

        `in_flight`: this client's requests at the engine. `is_needed`: whether they reached the limit since the last
        report.
        """
        if load.at <= self._seen_at:
            return False
        self._seen_at = load.at
        self._num_queues = self._num_queues + 1 if load.queued else 0
        if in_flight > self.limit:
            return True
        if load.retracted or self._num_queues >= PERSISTS:
            runs = load.running / (load.running + load.queued) if load.queued else AFTER_RETRACTION
            self._level = max(1.0, self._level * max(runs, LOWEST_SHARE))
            self._is_starting, self._num_queues, self._rise = False, 0, 1
        elif load.kv_use >= self._max_kv_use:
            self._is_starting = False
        elif is_needed and not load.queued:
            rise = self.limit if self._is_starting else self._rise
            self._level = min(float(self._most), self._level + rise)
            self._rise += not self._is_starting
        return True


class Upstream:
    """A client's view of one engine."""

    def __init__(self, url: str, prefix: str, now: float) -> None:
        """`prefix`: prefix of all request ids at this engine."""
        self.url, self.prefix = url, prefix
        self.most = 0
        """Number of slots. Set by the pool."""
        self.follows: Concurrency | None = None
        """Sets `most` from the engine's reports; None if it is fixed."""
        self.was_full = False
        """Whether all slots were taken at some time since the last report."""
        self.tries: set[Try] = set()
        self.waiting: dict[asyncio.Future[None], None] = {}
        """Waiting requests of sessions pinned to this engine, in order of arrival."""
        self.admitted, self.failures, self.down_until = True, 0, 0.0
        self.num_sent = 0
        self.served = -1
        """Highest sequence number of a request that has received a token; -1 before the first."""
        self.admitted_at = self.progress_at = now
        self._busy_s, self._busy_since = 0.0, now
        self.stalls_at: float | None = None
        """When the engine was last found stalled; None as soon as a request gets a token."""

    def add_try(self, one: Try, now: float) -> None:
        if not self.tries:
            self._busy_since = now
        self.tries.add(one)
        self.was_full = self.was_full or not self.has_slot

    @property
    def has_slot(self) -> bool:
        return len(self.tries) < self.most

    def remove_try(self, one: Try, now: float) -> None:
        if one in self.tries:
            self.tries.remove(one)
            self._busy_s += 0.0 if self.tries else now - self._busy_since

    def take_busy_s(self, now: float) -> float:
        """Returns the seconds since the last call during which at least one attempt was running."""
        if self.tries:
            self._busy_s, self._busy_since = self._busy_s + now - self._busy_since, now
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s

    def prefix_of(self, scope: RequestScope | None) -> str:
        """Returns the prefix of a scope's request ids; for None, the prefix of requests without a scope."""
        return f"{self.prefix}{0 if scope is None else scope.number}."


class Try:
    """One attempt to run a request at one engine."""

    def __init__(self, upstream: Upstream, scope: RequestScope | None, now: float) -> None:
        self.upstream, self.scope = upstream, scope
        self.interrupted: str | None = None
        self.reader: Try | None = None
        """In a pair: the attempt at the prefill engine, until prefill is done."""
        self.trouble: Exception | None = None
        """For a reader: why prefill failed."""
        self.beside: Upstream | None = None
        """For a reader: the decode engine, whose memory it may have to wait for."""
        self._guard: asyncio.Timeout | None = None
        self.heard_at = self._fresh_at = self.placed_at = now
        self.first_at: float | None = None
        self._number = self._place = upstream.num_sent
        self.rid = f"{upstream.prefix_of(scope)}{self._number}."
        self.is_test = upstream.failures > 0
        """Whether the engine was already unreachable, so that a failure says nothing about this request."""
        self.has_tokens = False
        upstream.num_sent += 1

    def got_tokens(self, now: float) -> None:
        """Records new tokens. Later silence may mean that the engine moved the attempt to the end of its queue."""
        upstream = self.upstream
        self.heard_at = upstream.progress_at = now
        upstream.stalls_at = None
        self._place = upstream.num_sent - 1
        if not self.has_tokens:
            self.has_tokens, upstream.served = True, max(upstream.served, self._number)
            self.first_at = now

    def silent_s(self, now: float) -> float:
        """Returns the seconds without progress (invariant 3). Time outside `wait` does not count."""
        if self._guard is None or self.reader is not None:
            self._fresh_at = now
        overtaken = self.upstream.served > self._place
        waits_at = [] if overtaken else [self.upstream]
        waits_at += [self.beside] if self.beside is not None else []
        self._fresh_at = max(self._fresh_at, self.heard_at, *(upstream.progress_at for upstream in waits_at))
        return now - self._fresh_at

    def interrupt(self, why: str) -> None:
        """Makes the next `wait` raise `Interrupted`; `break_off` also interrupts the current one."""
        self.interrupted = self.interrupted or why

    def break_off(self) -> None:
        """Wakes an interrupted attempt that is waiting: its `wait` raises `Interrupted`."""
        if self._guard is not None and self.interrupted is not None and self._guard.when() is None:
            self._guard.reschedule(0.0)

    async def wait(self, what: Callable[[], Awaitable[T]]) -> T:
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


# ---- time slicing: a thousand tasks woken at once would run in one iteration and block everything else -------------

CALLS_PER_TURN = 64


class Slices:
    """Runs many small calls, `CALLS_PER_TURN` per event-loop iteration."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self._due = False

    def add(self, work: Iterable[Callable[[], object]]) -> None:
        """Schedules calls, which must not raise."""
        self._work.extend(work)
        if self._work and not self._due:
            self._due = True
            self._turn()

    def _turn(self) -> None:
        try:
            for _ in range(min(CALLS_PER_TURN, len(self._work))):
                self._work.popleft()()
        finally:  # a call that raises must not stop the others
            if self._work:
                asyncio.get_running_loop().call_soon(self._turn)
            else:
                self._due = False


class Budget:
    """Limits how much work tasks do per event-loop iteration. Waiting tasks resume in order, in later iterations."""

    def __init__(self, most: int) -> None:
        """`most`: limit per iteration, in the units of `wait_for_room`; a larger task gets an iteration of its own."""
        self._most, self._used = most, 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._due = False

    async def wait_for_room(self, amount: int) -> None:
        """Waits for an iteration with room for `amount`, in first-come, first-served order."""
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
            if not waiter.done():  # else the waiter was cancelled
                waiter.set_result(None)
                self._spend(amount)
