"""Retry policy: `Job` decides whether and when a call retries after a failed request, and `Suspects` tracks requests
that kill engines.

Everything runs on one event loop. `Job.wait_after` never waits itself; it returns how long to wait.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp

from slime.core.errors import DeadlineExceeded, DeadlyRequest, EngineError, RequestRejected
from slime.core.liveness import backoff_s
from slime.rollout.client.call import Call, Generation, Refused, joined
from slime.rollout.client.upstream import (
    ABORTED,
    DIED,
    DISMISSED,
    LATE,
    PAUSED,
    UNREAD,
    Interrupted,
    RequestScope,
    Try,
)
from slime.rollout.transcript import Transcript

if TYPE_CHECKING:
    from slime.rollout.client.engine_pool import EnginePool


# ---- requests that kill engines ----------------------------------------------------------------------------------

MAX_DEATHS = 3
"""A request is deadly if this many engines died while working on it."""
TRIAL_TOKENS = 128
"""A request on trial is cleared after this many more tokens. A deadly request kills an engine during prefill or soon
after.
"""


@dataclass(slots=True)
class Deaths:
    number: int = 0
    on_trial_from: int | None = None
    """Number of tokens that the request had when its trial began; None if it is not on trial."""


class Suspects:
    """The requests of one client that may kill engines.

    An engine that dies takes healthy requests down with it, so one death proves nothing. After `MAX_DEATHS - 1` deaths,
    a request goes on trial: no other suspect is sent until the trial ends. A complete response, or `TRIAL_TOKENS` more
    tokens, clears the request. If its engine dies during the trial, the request fails with `DeadlyRequest`, and other
    requests with the same prompt are rejected. Suspects go on trial one at a time.
    """

    def __init__(self) -> None:
        self._trial = asyncio.Lock()
        self._deadly: dict[int, str] = {}
        """Hash of a prompt -> how its last engine died."""

    async def wait_for_turn(self, call: Call, deaths: Deaths) -> None:
        """Waits until the request may be sent. Raises `DeadlyRequest`."""
        if deaths.number >= MAX_DEATHS - 1 and deaths.on_trial_from is None:
            await self._trial.acquire()
            deaths.on_trial_from = len(call.tokens)
        if self._deadly and (said := self._deadly.get(_prompt_of(call))) is not None:
            raise _deadly(call, said)

    def note_death(self, call: Call, deaths: Deaths, said: str) -> None:
        """Records that the request's engine died. Raises `DeadlyRequest` if the request was on trial."""
        deaths.number += 1
        if deaths.on_trial_from is not None:
            self._deadly[_prompt_of(call)] = said
            raise _deadly(call, said)

    def note_tokens(self, call: Call, deaths: Deaths) -> None:
        if deaths.on_trial_from is not None and len(call.tokens) >= deaths.on_trial_from + TRIAL_TOKENS:
            self.release(deaths)
            deaths.number = 0

    def release(self, deaths: Deaths) -> None:
        """Ends the trial of a request that is cleared or finished, so the next suspect can be sent."""
        if deaths.on_trial_from is not None:
            deaths.on_trial_from = None
            self._trial.release()


def _prompt_of(call: Call) -> int:
    return hash((call.input_ids.tobytes(), call.picture_uris))


def _deadly(call: Call, said: str) -> DeadlyRequest:
    return DeadlyRequest(
        f"engines died under it: {MAX_DEATHS} engines died while working on a request of {len(call.input_ids)} ids, "
        f"which is not retried; the last engine: {said}"
    )


# ---- how a call continues after a failed request -----------------------------------------------------------------

RETRY_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
UNREACHABLE_STATUSES = frozenset({502, 503, 504})
"""HTTP statuses that a proxy or the engine itself sends if the engine has died or is not ready."""
MAY_RUN_STATUSES = frozenset({408, 500, 502, 504})
"""HTTP statuses after which the engine may still be working on the request."""
MAX_TRIES = 5
FIRST_RETRY_S, LONGEST_RETRY_S = 0.25, 8.0


@dataclass(slots=True)
class Job:
    """A running call and its retry state.

    1. A call is retried after lost connections, aborts, 408, 429, 502, 503 and 504, once after a 500, and never after
       any other 4xx. It fails after `MAX_TRIES` consecutive attempts without a token. Attempts at an engine that was
       already unreachable do not count: the call waits for the fleet.
    2. Each engine death is reported to `Suspects`.
    3. A request without progress fails its call. If the whole engine has stalled, the call may continue once, at
       another engine or after the engine restarts.
    """

    call: Call
    scope: RequestScope | None
    transcript: Transcript | None
    session: str | None
    interval: int
    streams: bool
    """Whether the caller consumes chunks as they arrive."""
    suspects: Suspects
    tries: int = 0
    internal_errors: int = 0
    taken_back: bool = False
    """Whether the run cancelled the call."""
    left_stalled: bool = False
    """Whether the call has already moved away from a stalled engine. A second stall is blamed on the call."""
    deaths: Deaths = field(default_factory=Deaths)

    def is_over(self) -> bool:
        """Returns whether the run has cancelled the call."""
        scope = self.scope
        return scope is not None and (scope.aborted or (scope.hands_back and self.call.num_requests > 0))

    def chunks(self, parts: list[Generation]) -> list[Generation]:
        """Returns what the caller gets of the parts that arrived together."""
        if not self.streams:
            return []
        if self.interval > 1:
            parts = [joined(parts)]
        return parts if self.call.finish is None else [part for part in parts if part.tokens]

    def take_back(self) -> None:
        """Ends the call before it is complete. The execution then counts as unfinished, regardless of what its code
        returns.
        """
        self.taken_back = True
        if self.transcript is not None:
            self.transcript.taken_back = True

    def wait_after(self, problem: Exception, one: Try, before: int, pool: EnginePool) -> float:
        """Returns the seconds to wait before the next request, after one was interrupted or refused.

        `one`: the failed attempt. `before`: number of tokens that the call had when the attempt was sent. Raises if the
        call has failed.
        """
        url = f"{one.upstream.url}/generate"
        match problem:
            case Interrupted(why=why) if why == UNREAD:
                reader = one.reader
                assert reader is not None and reader.trouble is not None, "the reader must say why prefill failed"
                return self.wait_after(reader.trouble, reader, before, pool)
            case Interrupted(why=why) if why == LATE:
                if one.upstream.stalls_at is not None and not self.left_stalled:
                    self.left_stalled = True
                    return 0.0
                raise DeadlineExceeded.waiting(
                    owner=f"request {one.rid}",
                    for_what=f"a token of {url} (--request-timeout-s)",
                    limit_s=pool.silence_limit_s,
                    last_progress=f"{len(self.call.tokens)} tokens",
                ) from problem
            case Interrupted(why=why) if why == ABORTED:
                return self.count_try("aborted by its engine", before, pool)
            case Interrupted(why=why) if why == DIED:
                self.suspects.note_death(self.call, self.deaths, f"{url}: its processes exited or did not respond")
                return 0.0
            case Interrupted(why=why):
                assert why in (DISMISSED, PAUSED), why
                return 0.0
            case Refused(status=status, text=text):
                said = f"{url}: HTTP {status}: {text}"
                if status not in RETRY_STATUSES:
                    num = len(self.call.input_ids) + before
                    told = f"{url} refused a request with {num} token ids: HTTP {status}: {text}"
                    raise RequestRejected(told) from problem
                if status in UNREACHABLE_STATUSES:
                    return self._not_reached(said, one, before, pool)
                self.internal_errors += status == 500
                if self.internal_errors > 1 and len(self.call.tokens) == before:
                    raise EngineError(f"a request failed after {self.tries + 1} attempts; last error: {said}")
                return self.count_try(said, before, pool)
            case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
                pool.failed(one.upstream)
                return 0.0
            case aiohttp.ClientError() | TimeoutError():
                said = f"{url}: {type(problem).__name__}: {problem}"
                if isinstance(problem, aiohttp.ClientError) and not one.is_test:
                    self.suspects.note_death(self.call, self.deaths, said)
                return self._not_reached(said, one, before, pool)
            case _:
                raise problem

    def _not_reached(self, said: str, one: Try, before: int, pool: EnginePool) -> float:
        """Records that the engine dropped the connection or is not ready. The attempt counts only if the engine was
        reachable before.

        Raises the same errors as `count_try`.
        """
        pool.failed(one.upstream)
        return 0.0 if one.is_test else self.count_try(said, before, pool)

    def count_try(self, said: str, before: int, pool: EnginePool) -> float:
        """Counts a failed attempt and returns the seconds to wait before the next one.

        Raises `EngineError` after `MAX_TRIES` attempts without a token.
        """
        if len(self.call.tokens) > before or not pool.is_open:
            self.tries, self.internal_errors = 0, 0
            return 0.0
        self.tries += 1
        if self.tries >= MAX_TRIES:
            raise EngineError(f"a request failed after {self.tries} attempts; last error: {said}")
        return backoff_s(self.tries, FIRST_RETRY_S, LONGEST_RETRY_S)
