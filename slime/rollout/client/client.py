"""`EngineClient`: token ids in; token ids, log-probs and weight versions out, whatever happens to engines meanwhile.

Consumes: calls of rollout tasks (`generate`, `stream`), and the list of engines (`admit`, `dismiss`). Produces: a
`Generation`, or its parts. A call waits for a place at an engine (`engines`), then for the events of its request, with
a limit on the time without progress; while the client is paused, for `resume`. It is woken by an event, the limit, the
end of its `RequestScope`, by which the loop ends every request that its tasks have running, or the dismissal of its
engine. What is left of a request in an engine is ended by a background task (`wire`); `drain` waits for those.

Invariants
1. A call outlives its requests. One that is interrupted, by an abort, a weight sync, the end of its engine or a status
   that may pass, is sent again with the tokens that it has (`call`), and the answer is all of them. Only what the run
   takes back (the end of its `RequestScope`, a pause that hands back) ends before: with `TakenBack`, so that nobody
   takes half an answer for a whole one, or with finish reason `abort` for those who ask for `returns_partial`. Either
   way its execution notes it (`transcript`), and is not finished then, whatever its code says.
2. Only what can succeed is tried again (`job`), and what kills engines is not (`suspects`). While no engine can be
   reached the call waits, within `engine_wait_s`.
3. Each request has an id of its own, because an engine refuses one that it is still working on, and is at one engine,
   which alone hears of its end. Many are ended by one abort for each engine, which ends no request of anybody else
   (`wire`); `pause` alone ends those of others, too, because it is there to have engines idle. Engines that work in
   pairs have a request each (`pairing`).
4. What a thousand requests must do at once is done a little in each turn of the event loop.
5. There is no limit on the length of an answer, and none on queueing.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp

from slime.core.errors import EngineError, TakenBack
from slime.core.routed_experts import ExpertFormat
from slime.core.text import NO_KEYS, EngineKeys
from slime.rollout.client.call import Call, EndOfText, Generation, Pictures, Refused, check_request, require_joinable
from slime.rollout.client.engine_pool import MAY_RUN_STATUSES, UNREACHABLE_STATUSES, EnginePool, Job, Suspects
from slime.rollout.client.pairing import PairPool
from slime.rollout.client.upstream import PAUSED, REQUEST_SCOPE, Budget, Interrupted, RequestScope, Try, Upstream
from slime.rollout.client.wire import Events, Wire
from slime.rollout.guard import waiting
from slime.rollout.traces import Sums, Traffic
from slime.rollout.transcript import STRAYS, TRANSCRIPT

__all__ = ["REQUEST_SCOPE", "EngineClient", "RequestScope"]

logger = logging.getLogger(__name__)

TOGETHER = 8
"""So many requests at an engine are ended by one abort, fewer by one each."""
ENGINES_AT_ONCE, NEXT_ENGINES_S = 4, 1.0
"""A scope is ended at so many engines, at the next ones when those have ended it or after this time: all their answers
come at once, and nothing else runs while the event loop reads what has come."""
PAUSE_POLL_S, PAUSE_REPEAT, PAUSE_POLLS = 0.01, 20, 500
"""An abort can overtake a request on its way to the engine, so it is repeated."""
STREAM_INTERVAL = 64
"""Tokens of an event. An event costs the client some 15 microseconds and 0.5 more for each token, and the engine's own
processes more than that: of an answer that is not streamed they still pass on every 50 tokens. What an engine that dies
has not sent is sampled again."""
IDS_IN_A_TURN = 32 * 1024
"""Of prompts that are checked, or sent, in one turn of the event loop: about a millisecond."""
IDS_OF_A_REQUEST = 1024
"""What else a request costs, in ids."""


class EngineClient:
    """Some engines, many requests. Use on one event loop; `close` at the end."""

    def __init__(
        self,
        *urls: str,
        request_timeout_s: float = 600.0,
        engine_wait_s: float = 900.0,
        max_concurrency: int = 256,
        vocab_size: int | None = None,
        keys: EngineKeys = NO_KEYS,
        token_versions: bool = False,
        experts: ExpertFormat | None = None,
        end: EndOfText | None = None,
        shared: bool = False,
        pairs: bool = False,
        trained: bool = True,
    ) -> None:
        """`urls`: engines that are admitted from the beginning.

        `request_timeout_s`: seconds without progress. `engine_wait_s`: seconds in which no engine can be reached.
        `max_concurrency`: requests in flight at most, per engine. `vocab_size`: ids beyond it kill an engine and are
        refused. `keys`: what the engines ask for. `token_versions`: engines must tell the version of each
        token. `experts`: engines are asked for the routed experts, which look like this. `end`: how answers end.
        `shared`: the engines may have requests of others, which are left alone. `pairs`: those that are admitted read
        prompts for others, or sample what others have read. `trained`: executions note what these engines sample,
        because it may be trained.
        """
        self._vocab_size = vocab_size
        self._token_versions, self._experts, self._end = token_versions, experts, end
        self._wire, self._shared, self._trained = Wire(keys), shared, trained
        limits: dict[str, Any] = {"silence_limit_s": request_timeout_s, "wait_limit_s": engine_wait_s}
        limits |= {"most_per_engine": max_concurrency}
        self._pool = PairPool(self._wire, **limits) if pairs else EnginePool(urls, **limits)
        self._traffic, self._suspects = Traffic(), Suspects()
        self._handing_back: list[RequestScope] = []
        self._budget = Budget(IDS_IN_A_TURN)
        self._in_front: list[Callable[[], Awaitable[None]]] = []
        self.num_pauses = 0
        """How often everything that engines had was ended, requests of others, too."""

    # ---- calls -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        session_id: str | None = None,
        experts_from: int = 0,
        returns_partial: bool = False,
        pictures: Pictures | None = None,
    ) -> Generation:
        """Samples a continuation of `input_ids`. `experts_from`: routed experts of earlier tokens are not sent again.

        `session_id`: requests of one go to one engine, as long as it lives. `returns_partial`: what the run takes back
        comes with the tokens that there are and finish reason `abort`, instead of `TakenBack`; the execution is not
        finished then and says so by its status, ABORTED. `pictures`: those of the prompt.

        Raises `TakenBack` if the run ended the request, `RequestRejected` if it can never succeed, `DeadlyRequest` if
        engines die of it, `EngineError` if they fail or answer nonsense, `DeadlineExceeded` after `request_timeout_s`
        without progress, or `engine_wait_s` without an engine.
        """
        await self._budget.take(IDS_OF_A_REQUEST + len(input_ids))
        job = self._job(input_ids, sampling_params, session_id, experts_from, STREAM_INTERVAL, False, pictures)
        async with aclosing(self._parts(job)) as parts:
            async for _ in parts:
                pass
        _require_whole(job, returns_partial)
        return job.call.answer()

    async def stream(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        session_id: str | None = None,
        experts_from: int = 0,
        returns_partial: bool = False,
        interval: int = 1,
    ) -> AsyncGenerator[Generation, None]:
        """As `generate`, in parts: yields what was sampled since the part before, for functions that stop early.

        Closing the iterator aborts the request in its engine; what it sampled beyond the last part is nobody's. Each
        part but the last has the finish reason `abort`. What the run takes back ends with `TakenBack`, or with such a
        part for those who ask for `returns_partial`. `interval`: tokens of a part, about. The last part has the routed
        experts of all: a stream that is closed before it has none.
        """
        await self._budget.take(IDS_OF_A_REQUEST + len(input_ids))
        job = self._job(input_ids, sampling_params, session_id, experts_from, interval, True)
        held: Generation | None = None
        async with aclosing(self._parts(job)) as parts:
            async for part in parts:
                if held is not None:
                    yield held
                held = None
                if job.call.finish is None and part.tokens:
                    yield part
                else:
                    held = part
        _require_whole(job, returns_partial)
        yield job.call.last_part(held)

    # ---- engines ---------------------------------------------------------------------------------------------------

    def engines(self) -> list[str]:
        """Addresses of the engines that are admitted."""
        return [upstream.url for upstream in self._pool.upstreams]

    def take_traffic(self) -> Sums | None:
        """What the requests since the last call waited for (`traffic`); None without requests."""
        return self._traffic.take(self._pool.upstreams, asyncio.get_running_loop().time())

    def stalled(self, within_s: float = math.inf) -> list[str]:
        """Addresses of those that bring no request a token (`--request-timeout-s`), though they may answer else, as
        was seen in the last `within_s` seconds.
        """
        since = asyncio.get_running_loop().time() - within_s
        return [one.url for one in self._pool.upstreams if one.stalls_at is not None and one.stalls_at >= since]

    def bringing(self, within_s: float) -> list[str]:
        """Addresses of those that have brought a token in the last `within_s` seconds."""
        since = asyncio.get_running_loop().time() - within_s
        return [one.url for one in self._pool.upstreams if one.served >= 0 and one.progress_at >= since]

    def admit(self, urls: Iterable[str], *, prefill: bool = False) -> None:
        """Requests may go to these engines, also those that wait for one. `prefill`: they read prompts for others."""
        self._pool.admit(urls, prefill=prefill)

    def dismiss(self, urls: Iterable[str], *, died: bool = False) -> None:
        """Takes engines away: requests that run there go on at another one at once, or wait for one. `died`: they have,
        or hang, and one of those requests may be why.
        """
        self._let_go(self._pool.dismiss(urls, died=died))

    def set_engines(self, urls: Iterable[str]) -> None:
        """Admits exactly these engines, as `admit` and `dismiss` do."""
        self._let_go(self._pool.set_engines(urls))

    def _let_go(self, upstreams: list[Upstream]) -> None:
        """Ends what we sent to these."""
        for upstream in upstreams:
            if upstream.tries:
                self._wire.abort_together(upstream.url, upstream.prefix, [one.rid for one in upstream.tries])

    # ---- all requests at once --------------------------------------------------------------------------------------

    async def abort_scope(self, scope: RequestScope) -> None:
        """Takes back all requests of a scope, at other clients, too; none is sent after it."""
        scope.aborted = True
        for pool in scope.pools:
            pool.wake_all()
        tries = defaultdict[Upstream, list[str]](list)
        for one in scope.tries:
            tries[one.upstream].append(one.rid)
        upstreams = list(tries)
        for begin in range(0, len(upstreams), ENGINES_AT_ONCE):
            delivering = [self._end_at(one, scope, tries[one]) for one in upstreams[begin : begin + ENGINES_AT_ONCE]]
            if under_way := [task for task in delivering if task is not None]:
                await asyncio.wait(under_way, timeout=NEXT_ENGINES_S)
        await self._wire.drain()

    def _end_at(self, upstream: Upstream, scope: RequestScope, rids: list[str]) -> asyncio.Task[None] | None:
        """Ends these requests, all that a scope has at an engine."""
        if len(rids) >= TOGETHER:
            return self._wire.abort_together(upstream.url, upstream.prefix_of(scope), rids)
        delivering = [self._wire.abort(upstream.url, rid) for rid in rids]
        return delivering[-1] if delivering else None

    async def pause(self, scope: RequestScope | None = None) -> None:
        """Ends every request of the engines; they go on after `resume`, with the tokens they have.

        Those of `scope` are taken back instead. A request that its engine does not end in time is interrupted.
        """
        self.num_pauses += 1
        self._pool.close_gate()
        if scope is not None:
            scope.hands_back = True
            self._handing_back.append(scope)
        self._pool.wake_all()
        for turn in range(PAUSE_POLLS):
            upstreams = self._pool.upstreams
            if not any(upstream.tries for upstream in upstreams):
                return
            if turn % PAUSE_REPEAT == 0:
                for upstream in upstreams:
                    if self._shared:
                        self._let_go([upstream])
                    elif upstream.tries or not turn:
                        self._wire.abort(upstream.url)
            await asyncio.sleep(PAUSE_POLL_S)
        self._pool.interrupt(self._pool.tries, PAUSED)

    def resume(self) -> None:
        """Requests go again."""
        for scope in self._handing_back:
            scope.hands_back = False
        self._handing_back.clear()
        self._pool.open_gate()

    async def drain(self) -> None:
        """Waits until every abort that was started in the background has been delivered (or given up)."""
        await self._wire.drain()

    def at_close(self, call: Callable[[], Awaitable[None]]) -> None:
        """What stands in front of these engines ends before they are let go; the last one registered is first."""
        self._in_front.append(call)

    async def close(self) -> None:
        """Ends what stands in front, delivers pending aborts, then closes the connections."""
        while self._in_front:
            await self._in_front.pop()()
        await self._pool.close()
        await self._wire.close()

    # ---- one call --------------------------------------------------------------------------------------------------

    def _job(
        self,
        input_ids: Sequence[int],
        params: Mapping[str, Any],
        session: str | None,
        experts_from: int,
        interval: int,
        streams: bool,
        pictures: Pictures | None = None,
    ) -> Job:
        """Raises `RequestRejected` for what may not be sent."""
        check_request(input_ids, params, self._vocab_size)
        call = Call(
            input_ids,
            params,
            token_versions=self._token_versions,
            experts=self._experts,
            experts_from=experts_from,
            end=self._end,
            pictures=pictures,
        )
        scope, transcript = REQUEST_SCOPE.get(), TRANSCRIPT.get()
        if transcript is not None and transcript.closed:  # a task that outlived its execution, and serves others now
            scope = transcript = None
        return Job(call, scope, transcript, session, interval, streams, self._suspects)

    async def _parts(self, job: Job) -> AsyncGenerator[Generation, None]:
        """Request after request, until the answer has ended or the call is taken back."""
        transcript = (job.transcript or STRAYS) if self._trained else None
        if transcript is not None:
            transcript.begin(job.call)
        try:
            with waiting() as limits:  # of its requests
                async with aclosing(self._requests(job)) as parts:
                    async for part in parts:
                        with limits.handing_out():
                            yield part
        finally:
            self._suspects.end(job.deaths)
            if transcript is not None:
                transcript.end(job.call)

    async def _requests(self, job: Job) -> AsyncGenerator[Generation, None]:
        call, handed_out = job.call, False
        ids = call.input_ids
        prompt = hash((len(ids), *ids[:64], *ids[-64:]))
        now = asyncio.get_running_loop().time
        while call.finish is None:
            await self._suspects.turn(call, job.deaths)
            lap, one, before = self._traffic.begin(now()), None, len(call.tokens)
            try:
                one = await self._pool.acquire(session=job.session, prompt=prompt, scope=job.scope, is_over=job.is_over)
            finally:
                if one is None:
                    self._traffic.end(lap, None, now(), tokens=0, read=(0, 0), again=call.num_requests > 0)
            if one is None:
                job.take_back()
                return
            delay_s, again = 0.0, call.num_requests > 0
            try:
                async with aclosing(self._listen(one, job)) as parts:
                    async for part in parts:
                        handed_out = True
                        yield part
                if call.finish is None and not job.is_over():  # aborted
                    delay_s = job.again("aborted by its engine", before, self._pool)
            except (Interrupted, aiohttp.ClientError, TimeoutError, Refused, EngineError) as problem:
                call.settle()
                if call.finish is None and not job.is_over():
                    delay_s = job.after(problem, one, before, self._pool)
            finally:
                self._pool.release(one)
                new = len(call.tokens) - before
                read, drafted = call.read, call.drafted
                self._traffic.end(lap, one, now(), tokens=max(0, new), read=read, again=again, drafted=drafted)
            if call.finish is None:
                if job.is_over():
                    job.take_back()
                    return
                require_joinable(call, handed_out)
                await asyncio.sleep(delay_s)

    async def _listen(self, one: Try, job: Job) -> AsyncGenerator[Generation, None]:
        """One request; its parts, if they are read. Leaves nothing in the engine. Raises what `Job.after` takes."""
        response, runs = None, False
        now, upstream = asyncio.get_running_loop().time, one.upstream
        try:
            await self._budget.take(IDS_OF_A_REQUEST + len(job.call.input_ids) + len(job.call.tokens))
            if job.is_over() or not self._pool.is_open:
                raise Interrupted(PAUSED)
            if one.interrupted is not None:
                raise Interrupted(one.interrupted)
            payload = job.call.payload(one.rid, job.interval)
            one.rid, runs = payload["rid"], True
            body = self._pool.begin(one, payload)
            response = await one.wait(lambda: self._wire.post(f"{upstream.url}/generate", body))
            if response.status not in UNREACHABLE_STATUSES:
                self._pool.heard(upstream)
            if response.status != 200:
                raise Refused(response.status, (await one.wait(response.read))[:300].decode(errors="replace"))
            if job.scope is not None and job.scope.aborted:  # while it was on its way, where no abort finds it
                self._wire.abort_together(upstream.url, upstream.prefix_of(job.scope), [one.rid])
            events, ended = Events(response), False
            while not ended:
                for event in await one.wait(events.next):
                    part, ended = job.call.take(event)
                    if part.tokens:
                        one.got_tokens(now())
                        self._pool.heard(upstream)
                        self._suspects.has_come_on(job.call, job.deaths)
                    if job.streams and (job.call.finish is None or part.tokens):
                        yield part
                    if ended:
                        break
            runs = not (event.get("meta_info") or {}).get("finish_reason")  # it may have been ended at a stop string
            if not runs:
                await self._wire.finish(response)
        except aiohttp.ClientConnectorError:
            runs = False
            raise
        except Refused as refusal:
            runs = refusal.status in MAY_RUN_STATUSES
            raise
        finally:
            if response is not None:
                response.release()
            if runs and upstream.admitted:
                self._wire.abort(upstream.url, one.rid)


def _require_whole(job: Job, returns_partial: bool) -> None:
    """Raises `TakenBack`."""
    if job.taken_back and not returns_partial:
        raise TakenBack(
            f"the run took a request back after {len(job.call.tokens)} tokens, because its step is over or a "
            "checkpoint is due; let this error out, and the execution is tried again"
        )
