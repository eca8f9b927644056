"""`EpisodeWorker`: runs whole episodes in a worker process, with its own engine clients, graders and tokenizer.

`WorkerFleet` sends the worker groups to run, admissions and dismissals of engines, and commands to end requests. Calls
start in the order in which they were made (`InOrder`). Everything runs on one event loop.

Invariants
1. The worker packs a group into a `GroupRecord`, in a thread, so that the rollout process does not have to encode it.
2. When `cancel` returns, the work has ended without a result, or is left behind with a warning that names it.
3. `abort` and `pause` affect the worker's requests exactly like the rollout process's own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from slime.buffer.groups import GroupRecord, record_of
from slime.core.errors import DeadlineExceeded
from slime.core.sample import Group
from slime.core.text import NO_KEYS, EngineKeys
from slime.core.topology import Worker
from slime.rollout.client.engine_client import REQUEST_SCOPE, RequestScope
from slime.rollout.context import RolloutContext, use
from slime.rollout.execute import Outcome, run_execution
from slime.rollout.factories import grader_pool, load_tokenizer, model_clients, teacher_client
from slime.rollout.guard import END_LIMIT_S, Watchdog, beside, end_tasks, num_left_behind
from slime.rollout.loopback_router import LoopbackRouter
from slime.rollout.traces import LoadSums, Sums
from slime.rollout.types import OpenChats, Progress
from slime.rollout.user_functions import RolloutHooks
from slime.rollout.workers.episodes import Done, Work, work_on
from slime.settings import Args
from slime.settings.topology_yaml import topology_of

logger = logging.getLogger(__name__)


def share_of(args: Args, num_workers: int) -> Args:
    """Returns the settings of one worker, with its share of request slots per engine and of grader processes."""
    return args.replace(
        sglang_server_concurrency=math.ceil(args.sglang_server_concurrency / num_workers),
        reward_num_workers=math.ceil(args.reward_num_workers / num_workers),
    )


class EpisodeWorker:
    """A worker. Built once per process, before or after its event loop starts."""

    def __init__(
        self,
        args: Args,
        num_workers: int,
        *,
        keys: EngineKeys = NO_KEYS,
        last_words: Path | None = None,
        open_chats: OpenChats | None = None,
    ) -> None:
        """`num_workers`: number of workers that share the engines and graders. `last_words`: the watchdog's file; None:
        no watchdog. `open_chats`: makes `current().chat` work.

        Raises `ConfigError`, `HookError`.
        """
        self._args = args = share_of(args, num_workers)
        self._hooks = RolloutHooks.load(args)
        self._tokenizer = load_tokenizer(args)
        self._clients = model_clients(args, self._tokenizer, keys=keys, open_chats=open_chats)
        policy = topology_of(args).main
        name = policy.name if policy is not None else ""
        self._models, self._eval_models = self._clients.split(name)
        self._loopback = LoopbackRouter(args, self._models, keys)
        self._client, self._eval_client = (
            models[name] if name else None for models in (self._models, self._eval_models)
        )
        self._teacher = teacher_client(args)
        self._graders = grader_pool(args, self._loopback.address_for_rewards)
        self._last_words = last_words
        self._watchdog: Watchdog | None = None
        self._scopes: dict[int, RequestScope] = {}
        """Scopes with running work, by their numbers in the rollout process."""
        self._running: dict[int, tuple[Work, asyncio.Task[Done]]] = {}

    async def ready(self) -> None:
        """Starts the watchdog. Returns once the worker is built."""
        if self._last_words is not None and self._watchdog is None:
            loop, limit_s = asyncio.get_running_loop(), self._args.execution_timeout_s
            self._watchdog = Watchdog(loop, limit_s=limit_s, last_words=self._last_words)

    def longest_stall_s(self) -> float:
        """Returns the longest time without an event-loop iteration since the last call."""
        return 0.0 if self._watchdog is None else self._watchdog.take_longest_s()

    def num_left_behind(self) -> int:
        return num_left_behind()

    async def run(self, work: Work) -> Done:
        """Runs a group. Raises errors that end the run, and `asyncio.CancelledError` after `cancel`."""
        if work.scope is not None:
            self._scopes.setdefault(work.scope, RequestScope())  # an abort may precede its first request
        task = asyncio.create_task(self._work(work), name=f"group-{work.group.group_index}")
        self._running[work.number] = work, task
        try:
            return await task
        finally:
            del self._running[work.number]
            if work.scope is not None and all(other.scope != work.scope for other, _ in self._running.values()):
                del self._scopes[work.scope]

    async def cancel(self, number: int) -> None:
        """Ends the work with this number; does nothing if it has already ended."""
        if number in self._running:
            _, task = self._running[number]
            await end_tasks([task], 2 * END_LIMIT_S)

    def admit(self, model: str, urls: Sequence[str], worker: Worker) -> None:
        self._clients[model].admit(urls, prefill=worker is Worker.PREFILL)

    def dismiss(self, model: str, urls: Sequence[str], died: bool = False) -> None:
        self._clients[model].dismiss(urls, died=died)

    def stalled(self, within_s: float) -> list[str]:
        """Like `RolloutManager.stalled`, for requests of this worker."""
        return [url for client in self._clients.values() for url in client.stalled(within_s)]

    def progressing(self, within_s: float) -> list[str]:
        """Like `RolloutManager.progressing`, for requests of this worker."""
        return [url for client in self._clients.values() for url in client.progressing(within_s)]

    def traffic(self) -> Sums | None:
        """Returns the sums over the worker's requests to the policy since the last call."""
        return None if self._client is None else self._client.take_traffic()

    def loads(self) -> dict[str, LoadSums]:
        """Returns what the policy's engines reported to this worker since the last call."""
        return {} if self._client is None else self._client.take_loads()

    async def abort(self, scope: int) -> None:
        """Cancels the requests of a scope, and rejects later ones."""
        if self._client is not None and scope in self._scopes:
            self._scopes[scope].aborted = True
            await self._client.abort_scope(self._scopes[scope])

    async def pause(self, scope: int | None) -> None:
        """Ends every request. Calls of `scope` are cancelled; all others continue after `resume`."""
        if self._client is not None:
            await self._client.pause(None if scope is None else self._scopes.get(scope))

    def resume(self) -> None:
        if self._client is not None:
            self._client.resume()

    async def drain(self) -> None:
        """Waits until all aborts are delivered."""
        if self._client is not None:
            await self._client.drain()

    async def close(self) -> None:
        """Ends running work, and closes graders and connections."""
        await asyncio.gather(*(self.cancel(number) for number in list(self._running)))
        await self._graders.close()
        if self._watchdog is not None:
            self._watchdog.close()
        for client in (self._loopback, *self._clients.values(), self._teacher):
            if client is not None:
                await client.close()

    async def _work(self, work: Work) -> Done:
        models, client = (self._eval_models, self._eval_client) if work.scope is None else (self._models, self._client)
        context = RolloutContext(
            args=self._args,
            client=client,
            models=models,
            tokenizer=self._tokenizer,
            graders=self._graders,
            progress=Progress(),
            loop=asyncio.get_running_loop(),
            rollout_id=work.rollout_id,
            teacher=self._teacher,
            loopback=self._loopback,
            on_eval_fleet=client is not self._client,
        )
        if work.scope is not None:
            REQUEST_SCOPE.set(self._scopes[work.scope])
        with use(context):
            if work.scope is None:
                return await self._evaluate(context, work)
            result = await work_on(context, work.group, work.params, self._hooks)
        finished = result.outcome is Outcome.FINISHED
        record = await beside(record_of, result.group, finished=finished)
        progress = context.progress
        return Done(
            record,
            result.outcome,
            result.reason,
            result.verdict,
            progress,
            result.num_refused,
            result.refusal,
            result.rewards,
        )

    async def _evaluate(self, context: RolloutContext, work: Work) -> Done:
        samples, params = list(work.group.samples), dict(work.params)
        generate, dataset = self._hooks.generate, work.dataset
        made = await run_execution(context, samples, params, generate, evaluation=True, dataset=dataset)
        group = Group(work.group.group_index, tuple(made.samples))
        record = await beside(GroupRecord.of, group, finished=made.outcome is Outcome.FINISHED)
        return Done(record, made.outcome, made.reason, None, context.progress)


# ---- the order of calls -----------------------------------------------------------------------------------------
TURN_LIMIT_S = 120.0
"""How long (s) a call waits for an earlier call that has not arrived."""


class InOrder:
    """Starts method calls on an object in the order of their numbers.

    Concurrent calls can arrive out of order: `resume` before `pause`, or `cancel` before its `run`. A call waits until
    all earlier calls have started; the last of them wakes it.
    """

    def __init__(self, called: Any) -> None:
        self._called = called
        self._next = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def call(self, number: int, method: str, *arguments: Any) -> Any:
        """Calls `method` once all calls with smaller numbers have started.

        Raises the errors of the method, and `DeadlineExceeded` if a call with a smaller number does not arrive.
        """
        await self._turn(number, method)
        try:
            answer = getattr(self._called, method)(*arguments)
        finally:
            self._next += 1
            if (following := self._waiting.get(self._next)) is not None and not following.done():
                following.set_result(None)
        # Starts in this event-loop iteration. A task would start only after a call that arrives in the same iteration.
        return await answer if isinstance(answer, Awaitable) else answer

    async def _turn(self, number: int, method: str) -> None:
        if number == self._next:
            return
        turn = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(TURN_LIMIT_S):
                await turn
        except TimeoutError:
            raise DeadlineExceeded.waiting(
                owner=f"call {number} of a rollout worker ({method})",
                for_what=f"the earlier call {self._next}",
                limit_s=TURN_LIMIT_S,
            ) from None
        finally:
            del self._waiting[number]
