"""`EngineClient`: token ids in; token ids, log-probs and weight versions out, even if engines die during the call.

A call (`generate`, `stream`) waits for a slot at an engine (`engine_pool`) and then for the events of its request, with
a limit on the time without progress. While the client is paused, calls wait for `resume`. A call wakes up on an event,
at the limit, when its engine is dismissed, or when its `RequestScope` (all requests of a loop's tasks) is aborted.
Background tasks abort requests that are still running in an engine (`wire`); `drain` waits for these tasks.

Invariants
1. A call outlives its requests. After an abort, a weight sync, an engine's death or a temporary HTTP error, the call
   sends a new request with the tokens sampled so far (`call`), so the result contains all tokens. Only the run itself
   ends a call early, by aborting the `RequestScope` or by pausing and handing back. The caller then gets `TakenBack`,
   so a partial completion is never mistaken for a complete one; with `returns_partial`, it gets a completion with
   finish reason `abort`. In both cases, the transcript marks the execution as unfinished, regardless of what its code
   returns.
2. A call is retried only after errors that a retry can fix (`Job`). A request that kills engines is not retried
   (`Suspects`). While no engine is reachable, a call waits at most `engine_wait_s`.
3. Each request has its own id, because an engine refuses an id that is still in use. One abort per engine ends many
   requests of this client, but none of other clients (`wire`). Only `pause` also ends requests of other clients,
   because it needs idle engines. In a pair, each engine gets its own request (`pairing`).
4. Work on many requests is spread over several iterations of the event loop.
5. The length of a completion and the time in a queue are not limited.
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

from slime.core.errors import EngineError, HookError, TakenBack
from slime.core.routed_experts import ExpertFormat
from slime.core.text import NO_KEYS, EngineKeys
from slime.rollout.client.call import (
    Call,
    EndOfText,
    Generation,
    Pictures,
    Refused,
    check_request,
    ids_of,
    require_joinable,
)
from slime.rollout.client.engine_pool import EnginePool
from slime.rollout.client.pairing import PairPool
from slime.rollout.client.retries import MAY_RUN_STATUSES, UNREACHABLE_STATUSES, Job, Suspects
from slime.rollout.client.upstream import PAUSED, REQUEST_SCOPE, Budget, Interrupted, RequestScope, Try, Upstream
from slime.rollout.client.wire import Events, Wire
from slime.rollout.guard import waiting
from slime.rollout.traces import LoadSums, Sums, Traffic
from slime.rollout.transcript import STRAYS, TRANSCRIPT
from slime.rollout.types import Chats, Messages, Reply, Tools

__all__ = ["REQUEST_SCOPE", "EngineClient", "RequestScope"]

logger = logging.getLogger(__name__)

TOGETHER = 8
"""If an engine has at least this many requests of a scope, they are aborted together."""
ENGINES_AT_ONCE, NEXT_ENGINES_S = 4, 1.0
"""When a scope is aborted, requests are aborted at `ENGINES_AT_ONCE` engines at a time. The next engines follow once
these are done, or after `NEXT_ENGINES_S`. The responses of an engine arrive all at once, and reading them blocks the
event loop.
"""
PAUSE_POLL_S, PAUSE_REPEAT, PAUSE_POLLS = 0.01, 20, 500
"""An abort can overtake a request on its way to the engine, so aborts are repeated."""
LOADS_EVERY_S = 1.0
"""How often engines with requests are asked for their load."""
STREAM_INTERVAL = 64
"""Tokens per event. An event costs the client about 15 microseconds plus 0.5 per token, and the engine's processes
more. (Even without streaming, these processes exchange a message every 50 tokens.) Tokens that an engine had not sent
before it died are sampled again.
"""
WHOLE = 0
"""Stands for an interval of `stream` that makes one chunk of the whole completion."""
STREAMED_INTERVAL = 8
"""Tokens per event for people and programs that read an answer while it is sampled. An engine sends the first token at
once, whatever the interval.
"""
IDS_IN_A_TURN = 32 * 1024
"""Number of prompt ids to check or send per event-loop iteration: about a millisecond of work."""
IDS_OF_A_REQUEST = 1024
"""Fixed cost of a request, expressed in ids."""


class EngineClient:
    """A client of the engines of one model. Use it on a single event loop, and call `close` at the end."""

    def __init__(
        self,
        *urls: str,
        request_timeout_s: float = 600.0,
        engine_wait_s: float = 900.0,
        max_concurrency: int = 256,
        max_kv_use: float | None = None,
        vocab_size: int | None = None,
        keys: EngineKeys = NO_KEYS,
        token_versions: bool = False,
        experts: ExpertFormat | None = None,
        end: EndOfText | None = None,
        shared: bool = False,
        pairs: bool = False,
        trained: bool = True,
    ) -> None:
        """`urls`: engines to admit initially.

        `request_timeout_s`: limit without progress. `engine_wait_s`: how long a call waits while no engine is
        reachable. `max_concurrency`: requests in flight per engine. `max_kv_use`: if set, their number follows the
        engine's own load, up to `max_concurrency` (`upstream.Concurrency`). `vocab_size`: prompts with ids outside the
        vocabulary are rejected, because they kill an engine. `keys`: API keys. `token_versions`: engines must report
        the version of each token. `experts`: the format of routed experts, if engines return them. `end`: detects the
        end of completions. `shared`: the engines also serve other clients, whose requests must not be aborted.
        `pairs`: the engines are prefill and decode engines. `trained`: completions may be trained on, so transcripts
        record them.
        """
        self.chats: Chats | None = None
        """Conversations with the model; None if it has no tokenizer."""
        self._vocab_size = vocab_size
        self._token_versions, self._experts, self._end = token_versions, experts, end
        self._wire, self._shared, self._trained = Wire(keys), shared, trained
        limits: dict[str, Any] = {"silence_limit_s": request_timeout_s, "wait_limit_s": engine_wait_s}
        limits |= {"most_per_engine": max_concurrency, "max_kv_use": max_kv_use}
        self._pool = PairPool(self._wire, **limits) if pairs else EnginePool(urls, **limits)
        self._follows_loads = max_kv_use is not None
        self._following: asyncio.Task[None] | None = None
        self._loads_seen: dict[str, LoadSums] = {}
        """Engine -> sums over its reports since the last `take_loads`."""
        self._unreported: set[str] = set()
        """Engines whose missing report has been logged."""
        self._traffic, self._suspects = Traffic(), Suspects()
        self._handing_back: list[RequestScope] = []
        self._budget = Budget(IDS_IN_A_TURN)
        self._in_front: list[Callable[[], Awaitable[None]]] = []
        self.num_tokens = 0
        """Sampled tokens that have arrived so far, including those of unfinished completions."""
        self.num_pauses = 0
        """Number of `pause` calls. Unless `shared`, each also ended the requests of other clients."""

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
        """Samples a continuation of `input_ids`.

        `session_id`: all requests of a session go to the same engine while it is alive. `experts_from`: index of the
        first token whose routed experts are returned. `returns_partial`: if the run cancels the request, return the
        tokens so far with finish reason `abort` instead of raising `TakenBack`; the execution then ends with status
        ABORTED. `pictures`: the images in the prompt.

        Raises `TakenBack` if the run cancels the request, `RequestRejected` if the request can never succeed,
        `DeadlyRequest` if it kills engines, `EngineError` if engines fail or send an invalid response, and
        `DeadlineExceeded` after `request_timeout_s` without progress or `engine_wait_s` without an engine.
        """
        await self._budget.wait_for_room(IDS_OF_A_REQUEST + len(input_ids))
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
        pictures: Pictures | None = None,
    ) -> AsyncGenerator[Generation, None]:
        """Like `generate`, but yields new tokens as they arrive, for callers that may stop early.

        Closing the iterator aborts the request and drops later tokens. Every chunk but the last has finish reason
        `abort`. If the run cancels the request, the stream raises `TakenBack`; with `returns_partial`, it ends with a
        chunk with finish reason `abort` instead. `interval`: approximate number of tokens per chunk; above 1, a chunk
        has all tokens that arrived since the one before, so a busy process gets longer ones. `WHOLE`: all tokens in one
        chunk. Only the last chunk carries routed experts (of all chunks), so a stream that is closed early yields none.
        """
        if interval == WHOLE:
            yield await self.generate(
                input_ids,
                sampling_params,
                session_id=session_id,
                experts_from=experts_from,
                returns_partial=returns_partial,
                pictures=pictures,
            )
            return
        await self._budget.wait_for_room(IDS_OF_A_REQUEST + len(input_ids))
        job = self._job(input_ids, sampling_params, session_id, experts_from, interval, True, pictures)
        previous: Generation | None = None
        async with aclosing(self._parts(job)) as parts:
            async for part in parts:
                if previous is not None:
                    yield previous
                previous = None
                if job.call.finish is None and part.tokens:
                    yield part
                else:
                    previous = part
        _require_whole(job, returns_partial)
        yield job.call.last_part(previous)

    async def chat(self, messages: Messages, *, tools: Tools = (), **sampling: Any) -> Reply:
        """Returns the model's answer to a conversation, with its own chat template. The answer is never trained on; for
        turns of the policy that are, see `RolloutContext.chat`.

        `sampling`: SGLang's sampling parameters; by default, at most 2,048 tokens, greedy.

        Raises `HookError` if the model has no tokenizer, `DataError` if its chat template rejects the conversation, and
        the errors of `generate`.
        """
        if self.chats is None:
            raise HookError("chat needs a tokenizer; set --hf-checkpoint, or a model_path in --sglang-config")
        return await self.chats.ask(self, messages, tools, sampling)

    # ---- engines ---------------------------------------------------------------------------------------------------

    def engines(self) -> list[str]:
        return [upstream.url for upstream in self._pool.upstreams]

    def take_traffic(self) -> Sums | None:
        """Returns the request counts and waiting times since the last call; None if there were no requests."""
        return self._traffic.take_sums(self._pool.upstreams, asyncio.get_running_loop().time())

    def take_loads(self) -> dict[str, LoadSums]:
        """Returns engine -> what it reported since the last call. Empty without `max_kv_use`."""
        seen, self._loads_seen = self._loads_seen, {}
        return seen

    def stalled(self, within_s: float = math.inf) -> list[str]:
        """Returns the engines that were found stalled in the last `within_s` seconds.

        An engine is stalled if none of its requests gets a token within `--request-timeout-s`, even if it still passes
        health checks.
        """
        since = asyncio.get_running_loop().time() - within_s
        return [one.url for one in self._pool.upstreams if one.stalls_at is not None and one.stalls_at >= since]

    def progressing(self, within_s: float) -> list[str]:
        """Returns the engines that sent a token in the last `within_s` seconds."""
        since = asyncio.get_running_loop().time() - within_s
        return [one.url for one in self._pool.upstreams if one.served >= 0 and one.progress_at >= since]

    def admit(self, urls: Iterable[str], *, prefill: bool = False) -> None:
        """Adds engines, which also serve requests that are already waiting. `prefill`: these are prefill engines."""
        self._pool.admit(urls, prefill=prefill)

    def dismiss(self, urls: Iterable[str], *, died: bool = False) -> None:
        """Removes engines. Their requests move to other engines immediately, or wait until one is available.

        `died`: these engines have died or are hanging, possibly because of one of the requests.
        """
        self._let_go(self._pool.dismiss(urls, died=died))

    def _let_go(self, upstreams: list[Upstream]) -> None:
        for upstream in upstreams:
            if upstream.tries:
                self._wire.abort_together(upstream.url, upstream.prefix, [one.rid for one in upstream.tries])

    # ---- all requests ----------------------------------------------------------------------------------------------

    async def abort_scope(self, scope: RequestScope) -> None:
        """Cancels all requests of a scope, including those of other clients, and rejects later ones."""
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
        if len(rids) >= TOGETHER:
            return self._wire.abort_together(upstream.url, upstream.prefix_of(scope), rids)
        delivering = [self._wire.abort(upstream.url, rid) for rid in rids]
        return delivering[-1] if delivering else None

    async def pause(self, scope: RequestScope | None = None) -> None:
        """Ends every request. After `resume`, the calls continue from the tokens they have.

        Calls of `scope` are cancelled instead. Requests that do not end in time are interrupted.
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
        """Lets requests continue after `pause`."""
        for scope in self._handing_back:
            scope.hands_back = False
        self._handing_back.clear()
        self._pool.open_gate()

    async def drain(self) -> None:
        await self._wire.drain()

    def at_close(self, call: Callable[[], Awaitable[None]]) -> None:
        """Registers a function that `close` awaits before anything else, in last-in, first-out order."""
        self._in_front.append(call)

    async def close(self) -> None:
        """Awaits the functions of `at_close`, delivers pending aborts, then closes the connections."""
        while self._in_front:
            await self._in_front.pop()()
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self._pool.close()
        await self._wire.close()

    # ---- the engines' own load (`max_kv_use`) ------------------------------------------------------------------------

    def _follow_loads(self) -> None:
        """Makes sure that engines with requests are asked for their load. Call this with each request."""
        if self._follows_loads and (self._following is None or self._following.done()):
            self._following = asyncio.create_task(self._ask_for_loads(), name="engine loads")

    async def _ask_for_loads(self) -> None:
        while asked := [upstream for upstream in self._pool.upstreams if upstream.tries]:
            began = asyncio.get_running_loop().time()
            await asyncio.gather(*map(self._ask_for_load, asked))
            await asyncio.sleep(max(0.0, began + LOADS_EVERY_S - asyncio.get_running_loop().time()))

    async def _ask_for_load(self, upstream: Upstream) -> None:
        """Takes an engine's report. Without one, its limit stays; the first failure of each engine is logged."""
        try:
            load = await self._wire.load(upstream.url)
        except (aiohttp.ClientError, TimeoutError, EngineError) as problem:
            if upstream.admitted and not upstream.failures and upstream.url not in self._unreported:
                self._unreported.add(upstream.url)
                logger.warning(
                    "engine %s does not report its load, so its limit stays at %d requests: %s",
                    *(upstream.url, upstream.most, str(problem) or type(problem).__name__),
                )
            return
        if self._pool.reported(upstream, load):
            seen = self._loads_seen.setdefault(upstream.url, LoadSums())
            seen.add(load, limit=upstream.most)

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
        """Raises `RequestRejected` if the request must not be sent to an engine."""
        ids = ids_of(input_ids)
        check_request(ids, params, self._vocab_size)
        call = Call(
            ids,
            params,
            token_versions=self._token_versions,
            experts=self._experts,
            experts_from=experts_from,
            end=self._end,
            pictures=pictures,
        )
        scope, transcript = REQUEST_SCOPE.get(), TRANSCRIPT.get()
        if transcript is not None and transcript.closed:  # the task has outlived its execution and now serves others
            scope = transcript = None
        return Job(call, scope, transcript, session, interval, streams, self._suspects)

    async def _parts(self, job: Job) -> AsyncGenerator[Generation, None]:
        """Sends requests until the completion is finished or the call is cancelled."""
        transcript = (job.transcript or STRAYS) if self._trained else None
        if transcript is not None:
            transcript.begin_call(job.call)
        try:
            with waiting() as limits:
                async with aclosing(self._requests(job)) as parts:
                    async for part in parts:
                        with limits.handing_out():
                            yield part
        finally:
            self._suspects.release(job.deaths)
            if transcript is not None:
                transcript.end_call(job.call)

    async def _requests(self, job: Job) -> AsyncGenerator[Generation, None]:
        call, handed_out = job.call, False
        ids = call.input_ids
        prompt = hash((len(ids), ids[:64].tobytes(), ids[-64:].tobytes()))
        now = asyncio.get_running_loop().time
        while call.finish is None:
            await self._suspects.wait_for_turn(call, job.deaths)
            lap, one, before = self._traffic.begin_try(now()), None, len(call.tokens)
            try:
                one = await self._pool.acquire(session=job.session, prompt=prompt, scope=job.scope, is_over=job.is_over)
                self._follow_loads()
            finally:
                if one is None:
                    self._traffic.end_try(lap, None, now(), tokens=0, read=(0, 0), again=call.num_requests > 0)
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
                    delay_s = job.count_try("aborted by its engine", before, self._pool)
            except (Interrupted, aiohttp.ClientError, TimeoutError, Refused, EngineError) as problem:
                call.settle()
                if call.finish is None and not job.is_over():
                    delay_s = job.wait_after(problem, one, before, self._pool)
            finally:
                self._pool.release(one)
                new = len(call.tokens) - before
                read, drafted = call.read, call.drafted
                self._traffic.end_try(lap, one, now(), tokens=max(0, new), read=read, again=again, drafted=drafted)
            if call.finish is None:
                if job.is_over():
                    job.take_back()
                    return
                require_joinable(call, handed_out)
                await asyncio.sleep(delay_s)

    async def _listen(self, one: Try, job: Job) -> AsyncGenerator[Generation, None]:
        """Sends one request and yields its chunks. Aborts the request if it may still be running in the engine.

        Raises the errors that `Job.wait_after` handles.
        """
        response, runs = None, False
        now, upstream = asyncio.get_running_loop().time, one.upstream
        try:
            await self._budget.wait_for_room(IDS_OF_A_REQUEST + len(job.call.input_ids) + len(job.call.tokens))
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
            if job.scope is not None and job.scope.aborted:  # the scope was aborted while the request was in transit
                self._wire.abort_together(upstream.url, upstream.prefix_of(job.scope), [one.rid])
            events, ended = Events(response), False
            while not ended:
                parts, before, problem = list[Generation](), len(job.call.tokens), None
                try:
                    for event in await one.wait(events.next):
                        part, ended = job.call.take_event(event)
                        parts.append(part)
                        if ended:
                            break
                except (Refused, EngineError) as found:
                    if not parts:
                        raise
                    problem = found  # the call has the tokens of the events before it
                if (new := len(job.call.tokens) - before) > 0:
                    self.num_tokens += new
                    one.got_tokens(now())
                    self._pool.heard(upstream)
                    self._suspects.note_tokens(job.call, job.deaths)
                for part in job.chunks(parts):
                    yield part
                if problem is not None:
                    raise problem
            runs = not (event.get("meta_info") or {}).get("finish_reason")  # the call may have ended at a stop string
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
    """Raises `TakenBack` if the run cancelled the call."""
    if job.taken_back and not returns_partial:
        raise TakenBack(
            f"the run cancelled a request after {len(job.call.tokens)} tokens, because its step is over or a "
            "checkpoint is due; do not catch this error, because slime retries the execution"
        )
