"""`EnginePool`: picks the engine for each request, and tracks the running requests of each engine.

`EngineClient` forwards `admit` and `dismiss`; its requests call `acquire`, then `heard`, `failed` and `release`.
`acquire` waits for an open gate and a free slot, at most `wait_limit_s` while no engine is reachable. It wakes up when
a slot is freed, when an engine is admitted or responds again, when the gate opens, and on `wake_all`. While there
are requests, a watch task looks for attempts and engines that make no progress. Everything runs on one event loop.

Invariants
1. An engine gets no attempt beyond its slots, or beyond one, as a probe, if it was unreachable. It has
   `most_per_engine` slots, or as many as its reports allow (`Concurrency`). If the number falls, running attempts stay.
2. All requests of a session go to the same engine while it is alive. Requests with the same prompt also share an
   engine, to use its prefix cache, unless its load is far above the lowest. All other requests go to the least loaded
   engine.
3. A dismissed engine gets no more requests, and its attempts are interrupted immediately. If it is admitted again, it
   counts as a new engine.
4. A freed slot wakes one waiter; if the waiter does not take the slot, it wakes the next. Only `wake_all` wakes all
   waiters, a few in each event-loop iteration (`Slices`). Interrupted attempts are woken the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any

from slime.core.engine_interface import OWN_REQUESTS
from slime.core.errors import DeadlineExceeded
from slime.rollout.client.upstream import (
    DIED,
    DISMISSED,
    LATE,
    Concurrency,
    Load,
    RequestScope,
    Slices,
    Try,
    Upstream,
)


class Loads:
    """Engines in buckets by number of free slots, so the least loaded engine is found without a scan.

    The load of an engine is its running attempts less its slots: 0 if all slots are taken.
    """

    def __init__(self) -> None:
        self._buckets: defaultdict[int, dict[Upstream, None]] = defaultdict(dict)
        self._load: dict[Upstream, int] = {}
        self._least = 0
        """All buckets below this one are empty."""

    def __len__(self) -> int:
        return len(self._load)

    def put(self, upstream: Upstream) -> None:
        self.drop(upstream)
        load = len(upstream.tries) - upstream.most
        self._load[upstream] = load
        self._buckets[load][upstream] = None
        self._least = min(self._least, load)

    def drop(self, upstream: Upstream) -> None:
        load = self._load.pop(upstream, None)
        if load is not None:
            bucket = self._buckets[load]
            del bucket[upstream]
            if not bucket:
                del self._buckets[load]

    def least_loaded(self) -> Upstream | None:
        """Returns the least loaded engine, or None. Ties go to the engine that has been at this load longest."""
        if not self._load:
            self._least = 0
            return None
        while self._least not in self._buckets:
            self._least += 1
        return next(iter(self._buckets[self._least]))


FIRST_COOLDOWN_S, LONGEST_COOLDOWN_S = 0.25, 4.0
"""How long an unreachable engine gets no requests, at first and at most."""
NEAR = 16
"""A request goes to the engine that has its prompt cached, unless that engine has at least this many more attempts than
the least loaded engine.
"""
REMEMBERED = 1 << 18
"""Number of sessions and prompts whose engine the pool remembers."""
LEAST_SILENT = 2
"""An engine counts as stalled if at least this many attempts get no tokens; a single one may itself be the cause."""
LOOKS = 8


class EnginePool:
    """The engines of one client. Use it on the event loop that runs the requests."""

    def __init__(
        self,
        urls: Iterable[str],
        *,
        most_per_engine: int,
        max_kv_use: float | None = None,
        silence_limit_s: float,
        wait_limit_s: float,
        wanted: str = "an engine",
    ) -> None:
        """`max_kv_use`: if set, the number of slots follows the load that each engine reports (`Concurrency`), up to
        `most_per_engine`. `silence_limit_s`: how long an attempt may go without progress. `wait_limit_s`: how long
        requests wait while no engine is reachable. `wanted`: what to call an engine in error messages.
        """
        self._most, self.silence_limit_s, self._wait_limit_s = most_per_engine, silence_limit_s, wait_limit_s
        self._wanted, self._max_kv_use = wanted, max_kv_use
        self._name, self._num_admitted = f"{OWN_REQUESTS}{uuid.uuid4().hex}", 0
        self._upstreams: dict[str, Upstream] = {}
        self._loads = Loads()
        """Engines that are reachable, as far as the pool knows."""
        self._homes: OrderedDict[Hashable, Upstream] = OrderedDict()
        self._waiting: dict[asyncio.Future[None], None] = {}
        self.is_open = True
        """Whether requests can get slots."""
        self._alone_since: float | None = None
        """When requests started waiting with no reachable engine; None if an engine is reachable or none waits."""
        self._watch: asyncio.Task[None] | None = None
        self._slices = Slices()
        self._first = [_plain(url) for url in urls]
        """Engines to admit once the event loop runs."""

    @property
    def upstreams(self) -> list[Upstream]:
        self._begin()
        return list(self._upstreams.values())

    @property
    def tries(self) -> list[Try]:
        return [one for upstream in self._upstreams.values() for one in upstream.tries]

    def admit(self, urls: Iterable[str], *, prefill: bool = False) -> None:
        """Adds engines, which also serve requests that are already waiting. Ignores engines that are already admitted.

        `prefill`: these are prefill engines; only `PairPool` supports them.
        """
        assert not prefill, "only `PairPool` supports prefill engines"
        self._begin()
        for url in map(_plain, urls):
            if url not in self._upstreams:
                self._num_admitted += 1
                upstream = Upstream(url, f"{self._name}.{self._num_admitted}.", _now())
                if self._max_kv_use is not None:
                    upstream.follows = Concurrency(self._most, max_kv_use=self._max_kv_use)
                upstream.most = self._most if upstream.follows is None else upstream.follows.limit
                self._upstreams[url] = upstream
                self._wake_for(upstream)

    def dismiss(self, urls: Iterable[str], *, died: bool = False) -> list[Upstream]:
        """Removes engines and interrupts their attempts. Returns the engines that had been admitted. `died`: the
        engines have died or are hanging.
        """
        self._begin()
        gone = [one for url in dict.fromkeys(map(_plain, urls)) if (one := self._upstreams.pop(url, None))]
        for upstream in gone:
            upstream.admitted = False
            self._loads.drop(upstream)
            self.interrupt(upstream.tries, DIED if died else DISMISSED)
            _wake(upstream.waiting)
        return gone

    def interrupt(self, tries: Iterable[Try], why: str) -> None:
        """Interrupts these attempts, a few in each event-loop iteration."""
        those = list(tries)
        for one in those:
            one.interrupt(why)
        self._slices.add(one.break_off for one in those)

    def close_gate(self) -> None:
        """Holds back new requests until `open_gate`."""
        self.is_open = False

    def open_gate(self) -> None:
        self.is_open = True
        self.wake_all()

    def wake_all(self) -> None:
        """Wakes all waiters to try again, a few in each event-loop iteration."""
        for queue in (self._waiting, *(upstream.waiting for upstream in self._upstreams.values())):
            waiting = list(queue)
            queue.clear()
            self._slices.add([partial(_rouse, waiter) for waiter in waiting])

    async def acquire(
        self, *, session: str | None, prompt: Hashable, scope: RequestScope | None, is_over: Callable[[], bool]
    ) -> Try | None:
        """Waits for a slot for a request. Returns None as soon as `is_over()`.

        `session`, `prompt`: requests with the same key should go to the same engine; None: any engine will do. Raises
        `DeadlineExceeded` if no engine is reachable for too long.
        """
        self._begin()
        if scope is not None:
            scope.pools.add(self)
        while not is_over():
            home = self._home(session) if session else None
            upstream = self._choose(home, prompt) if self.is_open else None
            if upstream is not None:
                for key in (session, prompt):
                    if key:
                        self._remember(key, upstream)
                one = Try(upstream, scope, _now())
                upstream.add_try(one, one.placed_at)
                if not upstream.failures:
                    self._loads.put(upstream)
                if scope is not None:
                    scope.tries.add(one)
                self._start_watch()
                return one
            self._wake_next()
            await self._wait(self._waiting if home is None else home.waiting)
        self._wake_next()
        return None

    def reported(self, upstream: Upstream, load: Load) -> bool:
        """Adjusts the slots of an engine to its report. Returns whether the report was new."""
        follows, before = upstream.follows, upstream.most
        if follows is None or not upstream.admitted:
            return False
        is_new = follows.take(load, in_flight=len(upstream.tries), is_needed=upstream.was_full)
        if is_new:
            upstream.most, upstream.was_full = follows.limit, len(upstream.tries) >= follows.limit
        if upstream.most != before and not upstream.failures:
            self._loads.put(upstream)
        if upstream.most > before:
            free = max(0, upstream.most - max(before, len(upstream.tries)))
            pinned = min(free, len(upstream.waiting))
            _wake(upstream.waiting, pinned)
            _wake(self._waiting, free - pinned)
        return is_new

    def begin(self, one: Try, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the payload to send to the attempt's engine. Called just before it is sent."""
        return payload

    def release(self, one: Try) -> None:
        """Frees the slot of an attempt."""
        upstream = one.upstream
        upstream.remove_try(one, _now())
        if one.scope is not None:
            one.scope.tries.discard(one)
        if upstream.admitted:
            if not upstream.failures:
                self._loads.put(upstream)
            if upstream.has_slot:  # not if the limit has fallen below the number of running attempts
                _wake(upstream.waiting or self._waiting, 1)

    def heard(self, upstream: Upstream) -> None:
        """Records that the engine responded. After a stall, only a token marks the engine as reachable again."""
        if upstream.failures and upstream.stalls_at is None:
            upstream.failures = 0
            if upstream.admitted:
                self._wake_for(upstream)

    def failed(self, upstream: Upstream) -> None:
        """Records that the engine was unreachable or dropped a connection."""
        now = _now()
        if self._upstreams.get(upstream.url) is not upstream or now < upstream.down_until:
            return  # dismissed, or already recorded for an attempt that failed at the same time
        cooldown_s = min(FIRST_COOLDOWN_S * 2**upstream.failures, LONGEST_COOLDOWN_S)
        upstream.failures += 1
        upstream.down_until = now + cooldown_s
        self._loads.drop(upstream)
        _wake(upstream.waiting)
        asyncio.get_running_loop().call_later(cooldown_s + 0.001, _wake, self._waiting, 1)

    def _begin(self) -> None:
        first, self._first = self._first, []
        if first:
            self.admit(first)

    def _wake_for(self, upstream: Upstream) -> None:
        """Wakes one waiter per free slot of an engine that has joined or has recovered."""
        self._loads.put(upstream)
        _wake(self._waiting, max(0, upstream.most - len(upstream.tries)))

    def _wake_next(self) -> None:
        """Wakes the next waiter if a slot is free. Called when a woken waiter does not take its slot."""
        if self._waiting and self.is_open:
            least = self._loads.least_loaded()
            if (least is not None and least.has_slot) or self._engine_to_retry() is not None:
                _wake(self._waiting, 1)

    def _home(self, key: Hashable) -> Upstream | None:
        upstream = self._homes.get(key)
        return upstream if upstream is not None and upstream.admitted and not upstream.failures else None

    def _choose(self, home: Upstream | None, prompt: Hashable) -> Upstream | None:
        """Returns an engine with a free slot; None if all are full, or if the session's engine is full."""
        if home is not None:
            return home if home.has_slot else None
        least = self._loads.least_loaded()
        if least is None or not least.has_slot:
            return self._engine_to_retry()
        near = self._home(prompt) if prompt else None
        most = min(near.most if near is not None else 0, len(least.tries) + NEAR)
        return near if near is not None and len(near.tries) < most else least

    def _engine_to_retry(self) -> Upstream | None:
        """Returns an idle, unreachable engine whose cooldown is over."""
        if len(self._loads) == len(self._upstreams):
            return None
        now = _now()
        down = [u for u in self._upstreams.values() if u.failures and not u.tries and now >= u.down_until]
        return min(down, key=lambda upstream: upstream.failures, default=None)

    def _remember(self, key: Hashable, upstream: Upstream) -> None:
        self._homes[key] = upstream
        self._homes.move_to_end(key)
        if len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)

    async def _wait(self, queue: dict[asyncio.Future[None], None]) -> None:
        waiter = asyncio.get_running_loop().create_future()
        queue[waiter] = None
        self._start_watch()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                _wake(queue or self._waiting, 1)  # pass the slot on to another waiter
            raise
        finally:
            queue.pop(waiter, None)

    # ---- the watch -------------------------------------------------------------------------------------------------

    def _start_watch(self) -> None:
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_tries(), name="engine-pool-watch")

    async def _watch_tries(self) -> None:
        """Interrupts attempts without progress, and fails waiting requests if no engine becomes reachable in time."""
        limits = (self.silence_limit_s, self._wait_limit_s)
        every_s = min(max(min(limits) / LOOKS, 0.02), 5.0)
        while self._waiting or any(upstream.tries or upstream.waiting for upstream in self._upstreams.values()):
            for upstream in list(self._upstreams.values()):
                now = _now()
                if late := [one for one in upstream.tries if one.silent_s(now) > self.silence_limit_s]:
                    waits_for_others = any(one.beside is not None for one in late)
                    engine_is_silent = now - upstream.progress_at > self.silence_limit_s and not waits_for_others
                    if engine_is_silent and len(late) >= LEAST_SILENT:
                        upstream.stalls_at = now
                        self.failed(upstream)
                    self.interrupt(late, LATE)
                await asyncio.sleep(0)
            self._look_for_engines(_now())
            await asyncio.sleep(every_s)
        self._alone_since = None

    def _look_for_engines(self, now: float) -> None:
        if self._loads or not (self._waiting or any(one.is_test for one in self.tries)):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > self._wait_limit_s:
            self._give_up()

    def _give_up(self) -> None:
        known = ", ".join(self._upstreams) or "none is admitted"
        for waiter in list(self._waiting):
            if not waiter.done():
                waiter.set_exception(
                    DeadlineExceeded.waiting(
                        owner="a request",
                        for_what=f"{self._wanted} that can be reached (--engine-wait-s)",
                        limit_s=self._wait_limit_s,
                        last_progress=known,
                    )
                )

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None


def _wake(queue: dict[asyncio.Future[None], None], most: int | None = None) -> None:
    """Wakes the first `most` waiters to try again; None: all of them."""
    for waiter in list(islice(queue, most)):
        queue.pop(waiter)
        _rouse(waiter)


def _rouse(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _plain(url: str) -> str:
    return url.rstrip("/")


def _now() -> float:
    return asyncio.get_running_loop().time()
