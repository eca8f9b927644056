"""`Job`: a call of the client under way, and what becomes of it when one of its requests was interrupted or refused.

Consumes: why a request ended without an answer. Produces: how long to wait before the next one, or the error that ends
the call. Waits for nothing.

Invariants
1. Only what can succeed is tried again: lost connections, aborts, 408, 429, 502, 503, 504; a 500 once; no other 4xx
   ever. `MAX_TRIES` in a row that bring no token end the call. An engine that cannot be reached is not a try, nor is
   one that breaks off, or answers 502, 503 or 504, after it could not be reached: the call waits for the fleet.
2. `suspects` hears of each engine that dies, whatever else that means.
3. A request without progress ends its call; but where its whole engine stalls, it goes on once: at another engine, or
   when that one was started again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import aiohttp

from slime.core.errors import DeadlineExceeded, EngineError, RequestRejected
from slime.rollout.call import Call, Refused
from slime.rollout.engines import EnginePool
from slime.rollout.scope import RequestScope
from slime.rollout.suspects import Deaths, Suspects
from slime.rollout.transcript import Transcript
from slime.rollout.upstream import ABORTED, DIED, DISMISSED, LATE, PAUSED, UNREAD, Interrupted, Try

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
        return min(FIRST_RETRY_S * 2 ** (self.tries - 1), LONGEST_RETRY_S)
