"""`EnginePool`: the engines that requests may go to, which of them gets the next one, and what each is working on.

Consumes: addresses from whoever watches over the engines (`admit`, `dismiss`), requests that ask for a place
(`acquire`), and news of their tries (`heard`, `failed`, `release`). Produces: a `Try`, a place at one engine. A request
waits for an open gate and an engine with room, within `wait_limit_s` while no engine can be reached; it is woken by a
place that becomes free, an engine that is admitted or answers again, the gate, or `wake_all`. One task looks now and
then for tries without progress, and engines without; it ends when there is nothing to watch. All on one event loop.

Invariants
1. An engine has at most `most_per_engine` tries. One that could not be reached has at most one, which finds out.
2. The requests of a session go to one engine as long as that lives; those of a prompt too, as long as its load is near
   the least: their common prefix is then in its cache. All others go to the engine with the least load.
3. A dismissed engine gets no more requests, and its tries are interrupted at once. Admitted again it is a new engine.
4. As many of those who wait are woken as there are places for them, and who does not take his wakes the next one. All
   are woken by `wake_all` alone, some in each turn of the event loop, as are tries that are interrupted (`slices`).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import aiohttp

from slime.core.errors import DeadlineExceeded, DeadlyRequest, EngineError, RequestRejected
from slime.core.ports import OWN_REQUESTS
from slime.core.silence import backoff_s
from slime.rollout.client.call import Call, Refused
from slime.rollout.client.upstream import (
    ABORTED,
    DIED,
    DISMISSED,
    LATE,
    PAUSED,
    UNREAD,
    Interrupted,
    RequestScope,
    Slices,
    Try,
    Upstream,
)
from slime.rollout.transcript import Transcript

# `Loads`: which of many engines has the least to do, found without looking at all of them.
#
# Consumes: engines whose number of tries has changed (`put`), or that are none to choose from any more (`drop`).
# Produces: the one with the least (`least`). Waits for nothing.


class Loads:
    """Engines in buckets, by the number of their tries."""

    def __init__(self) -> None:
        self._buckets: defaultdict[int, dict[Upstream, None]] = defaultdict(dict)
        self._load: dict[Upstream, int] = {}
        self._least = 0
        """No bucket below it has an engine."""

    def __len__(self) -> int:
        return len(self._load)

    def put(self, upstream: Upstream) -> None:
        """It may be chosen, by the number of tries that it has now."""
        self.drop(upstream)
        load = len(upstream.tries)
        self._load[upstream] = load
        self._buckets[load][upstream] = None
        self._least = min(self._least, load)

    def drop(self, upstream: Upstream) -> None:
        """It may not be chosen."""
        load = self._load.pop(upstream, None)
        if load is not None:
            bucket = self._buckets[load]
            del bucket[upstream]
            if not bucket:
                del self._buckets[load]

    def least(self) -> Upstream | None:
        """The one that has had the least number of tries for longest; None if there is none."""
        if not self._load:
            self._least = 0
            return None
        while self._least not in self._buckets:
            self._least += 1
        return next(iter(self._buckets[self._least]))


FIRST_COOLDOWN_S, LONGEST_COOLDOWN_S = 0.25, 4.0
"""How long an engine that could not be reached is left alone."""
NEAR = 16
"""Requests that an engine may have more than the least loaded one, and still get those whose prompt it knows."""
REMEMBERED = 1 << 18
"""Sessions and prompts whose engine is remembered."""
LEAST_SILENT = 2
"""Requests that an engine that stalls leaves without a token; one alone may be the request's own fault."""
LOOKS = 8
"""Looks at the tries within one limit."""


class EnginePool:
    """See the module's text. `admit` and `dismiss` are for the event loop on which requests run."""

    def __init__(
        self,
        urls: Iterable[str],
        *,
        most_per_engine: int,
        silence_limit_s: float,
        wait_limit_s: float,
        wanted: str = "an engine",
    ) -> None:
        """`silence_limit_s`: of a try; `wait_limit_s`: of the time in which no engine can be reached; `wanted`: what
        errors call one.
        """
        self._most, self.silence_limit_s, self._wait_limit_s = most_per_engine, silence_limit_s, wait_limit_s
        self._wanted = wanted
        self._name, self._num_admitted = f"{OWN_REQUESTS}{uuid.uuid4().hex}", 0
        self._upstreams: dict[str, Upstream] = {}
        self._loads = Loads()
        """Of those that can be reached, as far as is known."""
        self._homes: OrderedDict[Hashable, Upstream] = OrderedDict()
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._open = True
        self._alone_since: float | None = None
        """Since when no engine can be reached and somebody wants one."""
        self._watch: asyncio.Task[None] | None = None
        self._slices = Slices()
        self._first = [_plain(url) for url in urls]
        """Admitted when the event loop runs."""

    @property
    def upstreams(self) -> list[Upstream]:
        """Those that are admitted."""
        self._begin()
        return list(self._upstreams.values())

    @property
    def tries(self) -> list[Try]:
        """All that are with an engine that is admitted."""
        return [one for upstream in self._upstreams.values() for one in upstream.tries]

    @property
    def is_open(self) -> bool:
        """Whether requests get places."""
        return self._open

    def admit(self, urls: Iterable[str], *, prefill: bool = False) -> None:
        """Requests may go to these engines, also those that wait. Ones that are known stay as they are.

        `prefill`: they read prompts for others, which only engines in pairs do (`pairing`).
        """
        assert not prefill, "engines that answer whole requests read their own prompts"
        self._begin()
        for url in map(_plain, urls):
            if url not in self._upstreams:
                self._num_admitted += 1
                upstream = Upstream(url, f"{self._name}.{self._num_admitted}.", _now())
                self._upstreams[url] = upstream
                self._has_room(upstream)

    def dismiss(self, urls: Iterable[str], *, died: bool = False) -> list[Upstream]:
        """No request goes to these engines any more, and those that they have are interrupted.

        `died`: they have, or hang. Returns the ones that were known.
        """
        self._begin()
        gone = [one for url in dict.fromkeys(map(_plain, urls)) if (one := self._upstreams.pop(url, None))]
        for upstream in gone:
            upstream.admitted = False
            self._loads.drop(upstream)
            self.interrupt(upstream.tries, DIED if died else DISMISSED)
            _wake(upstream.waiting)
        return gone

    def set_engines(self, urls: Iterable[str]) -> list[Upstream]:
        """Exactly these engines are admitted. Returns those that were dismissed for it."""
        self._begin()
        wanted = [_plain(url) for url in urls]
        self.admit(wanted)
        return self.dismiss(self._upstreams.keys() - set(wanted))

    def interrupt(self, tries: Iterable[Try], why: str) -> None:
        """None of these waits for its engine any more; they are woken some at a time."""
        those = list(tries)
        for one in those:
            one.interrupt(why)
        self._slices.add(one.break_off for one in those)

    def close_gate(self) -> None:
        """No request gets a place until `open_gate`."""
        self._open = False

    def open_gate(self) -> None:
        """Requests get places again."""
        self._open = True
        self.wake_all()

    def wake_all(self) -> None:
        """Whoever waits looks again, some at a time."""
        for queue in (self._waiting, *(upstream.waiting for upstream in self._upstreams.values())):
            waiting = list(queue)
            queue.clear()
            self._slices.add([partial(_rouse, waiter) for waiter in waiting])

    async def acquire(
        self, *, session: str | None, prompt: Hashable, scope: RequestScope | None, is_over: Callable[[], bool]
    ) -> Try | None:
        """A place for a request; None as soon as `is_over`. Raises `DeadlineExceeded` if no engine can be reached.

        `session`, `prompt`: None where it does not matter which engine had others of them.
        """
        self._begin()
        if scope is not None:
            scope.pools.add(self)
        while not is_over():
            home = self._home(session) if session else None
            upstream = self._choose(home, prompt) if self._open else None
            if upstream is not None:
                for key in (session, prompt):
                    if key:
                        self._remember(key, upstream)
                one = Try(upstream, scope, _now())
                upstream.add(one, one.placed_at)
                if not upstream.failures:
                    self._loads.put(upstream)
                if scope is not None:
                    scope.tries.add(one)
                self._look_after()
                return one
            self._pass_on()
            await self._wait(self._waiting if home is None else home.waiting)
        self._pass_on()
        return None

    def begin(self, one: Try, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """A try is about to be sent; returns what its engine gets."""
        return payload

    def release(self, one: Try) -> None:
        """A try has ended: its place is free."""
        upstream = one.upstream
        upstream.remove(one, _now())
        if one.scope is not None:
            one.scope.tries.discard(one)
        if upstream.admitted:
            if not upstream.failures:
                self._loads.put(upstream)
            _wake(upstream.waiting or self._waiting, 1)

    def heard(self, upstream: Upstream) -> None:
        """It answers; of one that stalls only a token says so."""
        if upstream.failures and upstream.stalls_at is None:
            upstream.failures = 0
            if upstream.admitted:
                self._has_room(upstream)

    def failed(self, upstream: Upstream) -> None:
        """It could not be reached, or broke off. One that is not known any more stays so."""
        now = _now()
        if self._upstreams.get(upstream.url) is not upstream or now < upstream.down_until:
            return  # tries that broke with it
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

    def _has_room(self, upstream: Upstream) -> None:
        """An engine that is admitted, or answers again: as many as it can take look for a place."""
        self._loads.put(upstream)
        _wake(self._waiting, max(0, self._most - len(upstream.tries)))

    def _pass_on(self) -> None:
        """Somebody who was woken takes no place: who waits gets it, if there is one."""
        if self._waiting and self._open:
            least = self._loads.least()
            if (least is not None and len(least.tries) < self._most) or self._to_find_out() is not None:
                _wake(self._waiting, 1)

    def _home(self, key: Hashable) -> Upstream | None:
        upstream = self._homes.get(key)
        return upstream if upstream is not None and upstream.admitted and not upstream.failures else None

    def _choose(self, home: Upstream | None, prompt: Hashable) -> Upstream | None:
        """An engine with room; None if there is none, or not in the home of the session."""
        if home is not None:
            return home if len(home.tries) < self._most else None
        least = self._loads.least()
        if least is None or len(least.tries) >= self._most:
            return self._to_find_out()
        near = self._home(prompt) if prompt else None
        most = min(self._most, len(least.tries) + NEAR)
        return near if near is not None and len(near.tries) < most else least

    def _to_find_out(self) -> Upstream | None:
        """An engine that could not be reached, and may be again."""
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
        if self._loads or not (self._waiting or any(one.finds_out for one in self.tries)):
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
        """Ends the watch."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None


def _wake(queue: dict[asyncio.Future[None], None], most: int | None = None) -> None:
    """Lets the first `most` who wait look again, or all."""
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


# `Suspects`: requests whose engines died under them, and which of them kill engines.
#
# Consumes: what `Job` hears of dead engines. Produces: the turn of a request, or `DeadlyRequest`. A suspect waits for
# the one before it; it is woken when that has ended, or is cleared.
#
# Invariants
# 1. An engine that dies takes healthy requests with it, so a death proves nothing. A request whose engines died
#    `MAX_DEATHS - 1` times is on trial: no other suspect of the client is sent meanwhile. It is cleared by its answer,
#    or by `TRIAL_TOKENS` more tokens.
# 2. One whose engine dies during its trial ends with `DeadlyRequest`. So does every other request for the same ids,
#    without being sent: of a group, or by code that asks again.

MAX_DEATHS = 3
"""Engines that one request may have seen die."""
TRIAL_TOKENS = 128
"""What kills an engine is the prompt, or what comes soon behind the tokens that there are."""


@dataclass(slots=True)
class Deaths:
    """What one request has seen."""

    number: int = 0
    on_trial_from: int | None = None
    """Tokens that it had then."""


class Suspects:
    """Of one client."""

    def __init__(self) -> None:
        self._trial = asyncio.Lock()
        self._deadly: dict[int, str] = {}
        """Prompt -> how the last engine ended."""

    async def turn(self, call: Call, deaths: Deaths) -> None:
        """Waits until a request may be sent. Raises `DeadlyRequest`."""
        if deaths.number >= MAX_DEATHS - 1 and deaths.on_trial_from is None:
            await self._trial.acquire()
            deaths.on_trial_from = len(call.tokens)
        if self._deadly and (said := self._deadly.get(_prompt_of(call))) is not None:
            raise _deadly(call, said)

    def died(self, call: Call, deaths: Deaths, said: str) -> None:
        """Its engine did. Raises `DeadlyRequest`."""
        deaths.number += 1
        if deaths.on_trial_from is not None:
            self._deadly[_prompt_of(call)] = said
            raise _deadly(call, said)

    def has_come_on(self, call: Call, deaths: Deaths) -> None:
        """It has got tokens."""
        if deaths.on_trial_from is not None and len(call.tokens) >= deaths.on_trial_from + TRIAL_TOKENS:
            self.end(deaths)
            deaths.number = 0

    def end(self, deaths: Deaths) -> None:
        """It is cleared, or over: the next one has its turn."""
        if deaths.on_trial_from is not None:
            deaths.on_trial_from = None
            self._trial.release()


def _prompt_of(call: Call) -> int:
    return hash((tuple(call.input_ids), call.picture_uris))


def _deadly(call: Call, said: str) -> DeadlyRequest:
    return DeadlyRequest(
        f"engines died under it: {MAX_DEATHS} under a request of {len(call.input_ids)} ids, which is not sent again; "
        f"the last one: {said}"
    )


# `Job`: a call of the client under way, and what becomes of it when one of its requests was interrupted or refused.
#
# Consumes: why a request ended without an answer. Produces: how long to wait before the next one, or the error that
# ends the call. Waits for nothing.
#
# Invariants
# 1. Only what can succeed is tried again: lost connections, aborts, 408, 429, 502, 503, 504; a 500 once; no other 4xx
#    ever. `MAX_TRIES` in a row that bring no token end the call. An engine that cannot be reached is not a try, nor is
#    one that breaks off, or answers 502, 503 or 504, after it could not be reached: the call waits for the fleet.
# 2. `suspects` hears of each engine that dies, whatever else that means.
# 3. A request without progress ends its call; but where its whole engine stalls, it goes on once: at another engine, or
#    when that one was started again.

RETRY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
UNREACHABLE_STATUSES = frozenset({502, 503, 504})
"""The engine is not there, or not ready, says whoever answers in its place."""
MAY_RUN_STATUSES = frozenset({408, 500, 502, 504})
"""Somebody gave up on an engine that may still work on the request."""
MAX_TRIES = 5
FIRST_RETRY_S, LONGEST_RETRY_S = 0.25, 8.0


@dataclass(slots=True)
class Job:
    """A call under way."""

    call: Call
    scope: RequestScope | None
    transcript: Transcript | None
    """Of the execution that asks."""
    session: str | None
    interval: int
    streams: bool
    """Somebody reads the parts."""
    suspects: Suspects
    tries: int = 0
    """Requests in a row that brought no token."""
    internal_errors: int = 0
    taken_back: bool = False
    """The run ended it before its end."""
    went_on: bool = False
    """It has left an engine that stalls; a second one would be its own fault."""
    deaths: Deaths = field(default_factory=Deaths)

    def is_over(self) -> bool:
        """Whether the run takes it back."""
        scope = self.scope
        return scope is not None and (scope.aborted or (scope.hands_back and self.call.num_requests > 0))

    def take_back(self) -> None:
        """It ends without its whole answer, and so does its execution, whatever its code makes of that."""
        self.taken_back = True
        if self.transcript is not None:
            self.transcript.taken_back = True

    def after(self, problem: Exception, one: Try, before: int, pool: EnginePool) -> float:
        """What a request that was interrupted or refused means: seconds to wait. Raises if it is the end.

        `one`: where it was; `before`: tokens that the call had when it was sent.
        """
        url = f"{one.upstream.url}/generate"
        match problem:
            case Interrupted(why=why) if why == UNREAD:
                reader = one.reader
                assert reader is not None and reader.trouble is not None, "it was said why the prompt was not read"
                return self.after(reader.trouble, reader, before, pool)
            case Interrupted(why=why) if why == LATE:
                if one.upstream.stalls_at is not None and not self.went_on:
                    self.went_on = True
                    return 0.0
                raise DeadlineExceeded.waiting(
                    owner=f"request {one.rid}",
                    for_what=f"a token of {url} (--request-timeout-s)",
                    limit_s=pool.silence_limit_s,
                    last_progress=f"{len(self.call.tokens)} tokens",
                ) from problem
            case Interrupted(why=why) if why == ABORTED:
                return self.again("aborted by its engine", before, pool)
            case Interrupted(why=why) if why == DIED:
                self.suspects.died(self.call, self.deaths, f"{url}: its processes ended, or did not answer")
                return 0.0
            case Interrupted(why=why):
                assert why in (DISMISSED, PAUSED), why
                return 0.0
            case Refused(status=status, text=text):
                said = f"{url}: HTTP {status}: {text}"
                if status not in RETRY_STATUSES:
                    num = len(self.call.input_ids) + before
                    raise RequestRejected(f"{url} refused a request of {num} ids: HTTP {status}: {text}") from problem
                if status in UNREACHABLE_STATUSES:
                    return self._not_reached(said, one, before, pool)
                self.internal_errors += status == 500
                if self.internal_errors > 1 and len(self.call.tokens) == before:
                    raise EngineError(f"a request failed after {self.tries + 1} tries; the last one: {said}")
                return self.again(said, before, pool)
            case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
                pool.failed(one.upstream)
                return 0.0
            case aiohttp.ClientError() | TimeoutError():
                said = f"{url}: {type(problem).__name__}: {problem}"
                if isinstance(problem, aiohttp.ClientError) and not one.finds_out:
                    self.suspects.died(self.call, self.deaths, said)
                return self._not_reached(said, one, before, pool)
            case _:
                raise problem

    def _not_reached(self, said: str, one: Try, before: int, pool: EnginePool) -> float:
        """Its engine broke off, or is not ready: a try if it was there when the request was sent. Raises as `again`."""
        pool.failed(one.upstream)
        return 0.0 if one.finds_out else self.again(said, before, pool)

    def again(self, said: str, before: int, pool: EnginePool) -> float:
        """Counts a try; seconds to wait before the next one. Raises `EngineError` after `MAX_TRIES` without a token."""
        if len(self.call.tokens) > before or not pool.is_open:
            self.tries, self.internal_errors = 0, 0
            return 0.0
        self.tries += 1
        if self.tries >= MAX_TRIES:
            raise EngineError(f"a request failed after {self.tries} tries; the last one: {said}")
        return backoff_s(self.tries, FIRST_RETRY_S, LONGEST_RETRY_S)
