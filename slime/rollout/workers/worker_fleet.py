"""`WorkerFleet`: runs groups in worker processes (`EpisodeWorker`).

A call waits for the worker that runs its group. It wakes up on the result, on the worker's death, and on cancellation,
which is forwarded to the worker. Everything runs on the event loop of the rollout process, which never reads the tokens
of a group.

Invariants
1. A group goes to the worker with the fewest groups. A dead worker is replaced by a new process, which receives the
   current engines and the current pause state. The dead worker's groups are resent as they were issued; none is lost.
2. If `SUSPECT` workers died while running a group, the group runs alone in a process of its own. If that process dies
   too, the group fails, but the groups that previously ran beside it do not.
3. Commands reach each worker, and the clients of this process, in the order in which they were issued.
4. If a worker dies `MAX_DEATHS` times in a row without finishing a group, or cannot be built, the run ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

from slime.core.errors import START_FLAG, ActorDied, DeadlineExceeded, SlimeError, WorkerStalled
from slime.core.liveness import within
from slime.core.sample import Group, Sample
from slime.core.topology import Worker
from slime.rollout.client.upstream import RequestScope
from slime.rollout.context import RolloutContext
from slime.rollout.execute import Execution, GroupResult, Outcome
from slime.rollout.generate import eval_sampling_params
from slime.rollout.guard import beside, waiting
from slime.rollout.traces import LoadSums, Sums
from slime.rollout.user_functions import RolloutHooks
from slime.rollout.workers.episodes import Done, Episodes, LocalEpisodes, Work
from slime.settings.eval_config import EvalDatasetConfig

logger = logging.getLogger(__name__)

SUSPECT = 4
"""Number of worker deaths after which a group runs alone. Low enough to find a group that kills its process quickly,
but high enough that other groups rarely share all these deaths, because groups that run alone wait for each other.
"""
STALL_COUNTS = 2
"""A stall counts as this many deaths, because it costs `--execution-timeout-s`."""
MAX_DEATHS = SUSPECT + 2
"""Must exceed `SUSPECT`, so that a group that kills its process is identified before the run ends."""
ORDER_LIMIT_S = 60.0
"""How long (s) a worker may take to execute a command; user code can block its event loop."""
CLOSE_LIMIT_S = 30.0
QUERY_LIMIT_S = 2.0
"""How long (s) a worker may take to answer a query."""


class _WorkerLost(Exception):
    """The worker of a group died."""

    def __init__(self, death: ActorDied) -> None:
        super().__init__(str(death))
        self.is_stall = isinstance(death, WorkerStalled)


class _Guilty(Exception):
    """A group killed the process in which it was running alone."""


class _Ended(Exception):
    """The run cancelled the requests of a group while it was between two workers."""


class WorkerPort(Protocol):
    """The fleet's interface to a worker process."""

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Calls a method of the `EpisodeWorker`. The worker starts calls in the order in which they were made.

        Awaiting the result raises `ActorDied` if the process has died, and any error of the method.
        """

    def kill(self) -> None:
        """Kills the process immediately."""


@dataclass(slots=True, eq=False)
class _Member:
    """A worker. Its process changes when it is replaced."""

    number: int
    port: WorkerPort
    is_shared: bool = True
    """Whether the worker takes any group; otherwise it runs a single group alone."""
    num_running: int = 0
    num_deaths: int = 0
    """Number of deaths since the worker last finished a group."""
    orders: set[asyncio.Future[Any]] = field(default_factory=set)
    """Commands running in the background."""


class WorkerFleet(Episodes):
    """All workers of a run. Use it on a single event loop, and call `close` at the end."""

    def __init__(self, start: Callable[[int], WorkerPort], num_workers: int, *, start_limit_s: float = 600.0) -> None:
        """`start`: starts the process of worker number N without waiting for it. `start_limit_s`:
        `--engine-start-timeout-s`.
        """
        self._start_limit_s = start_limit_s
        self._start, self._num_workers = start, num_workers
        self._members: list[_Member] = []
        """Started by the first call, which also sends them all earlier commands."""
        self._numbers = count(1)
        self._admitted: dict[tuple[str, str], Worker] = {}
        """(model, engine) -> whether the engine does prefill, decode or both."""
        self._conductor = LocalEpisodes(None)
        self._paused = self._closing = False
        self._verdict: ActorDied | None = None
        """The error that ends the run."""
        self._deaths = Counter[tuple[int, int | None]]()
        """(group, its first execution) -> number of workers that died while running it."""
        self._alone = asyncio.Semaphore(num_workers)
        self._counts: dict[_Member, Sums] = {}
        """Sums over each worker's requests that `traffic` has not returned yet."""

    def include(self, conductor: LocalEpisodes) -> None:
        """Sends all commands to `conductor` as well, because user functions send their requests from this process."""
        self._conductor = conductor

    async def ready(self) -> None:
        """Returns once all workers are built. Raises their constructors' errors, and `DeadlineExceeded`."""
        self._begin()
        try:
            starts = asyncio.gather(*(member.port.call("ready") for member in self._members))
            await within(starts, self._start_limit_s)
        except TimeoutError as late:
            raise DeadlineExceeded.waiting(
                owner="the rollout",
                for_what=f"{self._num_workers} rollout workers to start",
                limit_s=self._start_limit_s,
                flag=START_FLAG,
            ) from late

    # ---- groups --------------------------------------------------------------------------------------------------

    async def run(
        self,
        context: RolloutContext,
        group: Group,
        params: Mapping[str, Any],
        hooks: RolloutHooks,
        scope: RequestScope,
    ) -> GroupResult:
        """See `Episodes.run`. The workers load their own hooks."""
        group.pack()
        try:
            done = await self._done(scope, context.rollout_id, params, group)
        except _Ended:
            return GroupResult(group, Outcome.ABORTED)
        except _Guilty as death:
            return GroupResult(group, Outcome.FAILED, context.progress.failed(str(death)))
        context.progress.add(done.progress)
        return GroupResult(
            done.record, done.outcome, done.reason, done.verdict, done.num_refused, done.refusal, done.rewards
        )

    async def evaluate(
        self, context: RolloutContext, sample: Sample, dataset: EvalDatasetConfig, hooks: RolloutHooks
    ) -> Execution:
        sample.pack()
        group = Group(sample.group_index or 0, (sample,))
        try:
            done = await self._done(None, context.rollout_id, eval_sampling_params(dataset), group, dataset)
        except _Guilty as death:
            return Execution([sample], Outcome.FAILED, context.progress.failed(str(death)))
        context.progress.add(done.progress)
        return Execution(list(done.record.group().samples), done.outcome, done.reason)

    async def _done(
        self,
        scope: RequestScope | None,
        rollout_id: int | None,
        params: Mapping[str, Any],
        group: Group,
        dataset: EvalDatasetConfig | None = None,
    ) -> Done:
        """Returns the result of the first worker that survives. Raises `_Ended`, `_Guilty`, and errors that end the
        run.
        """
        key = group.group_index, group.samples[0].index
        while True:
            self._begin()
            if scope is not None and scope.aborted:
                raise _Ended
            number = None if scope is None else scope.number
            work = Work(next(self._numbers), number, rollout_id, params, group, dataset)
            is_suspect = self._deaths[key] >= SUSPECT
            try:
                if is_suspect:
                    done = await self._done_alone(work)
                else:
                    shared = [member for member in self._members if member.is_shared]
                    done = await self._done_by(min(shared, key=lambda one: one.num_running), work)
            except _WorkerLost as loss:
                if is_suspect:
                    raise _Guilty(f"its worker died alone: {loss}") from loss
                self._deaths[key] += STALL_COUNTS if loss.is_stall else 1
                continue
            del self._deaths[key]
            return done

    async def _done_alone(self, work: Work) -> Done:
        """Runs the work alone in a new process, at most `num_workers` of them at a time."""
        with waiting():
            async with self._alone:
                member = _Member(self._num_workers, self._start(self._num_workers), is_shared=False)
                self._members.append(member)
                try:
                    self._tell_state(member)
                    return await self._done_by(member, work)
                finally:
                    self._members.remove(member)
                    member.port.kill()

    async def _done_by(self, member: _Member, work: Work) -> Done:
        """Runs the work in a member. Raises `_WorkerLost` if the worker dies, and errors that end the run."""
        port = member.port
        member.num_running += 1
        try:
            with waiting():  # the worker has its own limits
                done: Done = await port.call("run", work)
                record = await beside(done.record.owned)
        except asyncio.CancelledError:
            await self._bounded(member, "cancel", work.number)
            raise
        except ActorDied as death:
            self._replace(member, port, death)
            raise _WorkerLost(death) from death
        finally:
            member.num_running -= 1
        member.num_deaths = 0
        return replace(done, record=record)

    def _replace(self, member: _Member, port: WorkerPort, death: ActorDied) -> None:
        """Replaces a dead process, once per death."""
        if member.port is not port or not member.is_shared or self._closing or self._verdict is not None:
            return
        port.kill()  # the process may be alive but unreachable
        member.num_deaths += 1
        if member.num_deaths >= MAX_DEATHS:
            self._verdict = ActorDied(
                f"rollout worker {member.number} died {member.num_deaths} times in a row without finishing a group "
                f"(last error: {death}); check its log: user code killed the process, or it ran out of memory"
            )
            return
        logger.warning("rollout worker %d died, restarting it: %s", member.number, death)
        member.port = self._start(member.number)
        self._tell_state(member)

    def _begin(self) -> None:
        if self._closing:
            raise ActorDied("the rollout workers are closed")
        if self._verdict is not None:
            raise self._verdict
        if not self._members:
            self._members = [_Member(number, self._start(number)) for number in range(self._num_workers)]
            for member in self._members:
                self._tell_state(member)

    def _tell_state(self, member: _Member) -> None:
        """Sends the current state to a new process: first the pause, then the engines."""
        self._follow(member, self._started(member, member.port))
        if self._paused:
            self._tell(member, "pause", None)
        for (model, url), worker in self._admitted.items():
            self._tell(member, "admit", model, [url], worker)

    async def _started(self, member: _Member, port: WorkerPort) -> None:
        """Waits for a process to start. Kills it if it takes too long."""
        try:
            await within(port.call("ready"), self._start_limit_s)
        except TimeoutError:
            port.kill()
            late = ActorDied(
                f"rollout worker {member.number} did not start within {self._start_limit_s:.0f} s and was killed; "
                f"raise {START_FLAG}"
            )
            self._replace(member, port, late)
        except ActorDied as death:
            self._replace(member, port, death)
        except SlimeError as error:  # its groups raise it as well
            logger.warning("rollout worker %d did not start: %s", member.number, error)

    # ---- engines and requests --------------------------------------------------------------------------------------

    def admit(self, model: str, urls: Sequence[str], worker: Worker) -> None:
        self._admitted |= {(model, url): worker for url in urls}
        self._tell_all("admit", model, list(urls), worker)

    def dismiss(self, model: str, urls: Sequence[str], died: bool = False) -> None:
        for url in urls:
            self._admitted.pop((model, url), None)
        self._tell_all("dismiss", model, list(urls), died)

    async def stalled(self, within_s: float) -> list[str]:
        """Like `RolloutManager.stalled`, for the workers that answer in time."""
        return [url for urls in await self._ask_all("stalled", within_s) for url in urls or ()]

    async def progressing(self, within_s: float) -> list[str]:
        """Like `RolloutManager.progressing`, for the workers that answer in time."""
        return [url for urls in await self._ask_all("progressing", within_s) for url in urls or ()]

    async def longest_stall_s(self) -> float:
        """Returns the longest time without an iteration of any worker's event loop since the last call.

        A worker that does not answer in time is currently stalled, and counts as `QUERY_LIMIT_S`.
        """
        seen = await self._ask_all("longest_stall_s")
        return max((QUERY_LIMIT_S if s is None else s for s in seen), default=0.0)

    async def traffic(self) -> list[Sums]:
        """Returns the sums over each worker's requests. Late results are included in the next call."""
        if asked := [self._follow(member, self._counted(member)) for member in self._members]:
            await asyncio.wait(asked, timeout=QUERY_LIMIT_S)
        counted, self._counts = self._counts, {}
        return list(counted.values())

    async def loads(self) -> list[dict[str, LoadSums]]:
        """Returns what engines reported to each worker that answers in time (`EngineClient.take_loads`)."""
        return [seen for seen in await self._ask_all("loads") if seen]

    async def num_left_behind(self) -> int:
        """Counts user tasks and threads left behind in this process and in the workers that answer in time."""
        here = await self._conductor.num_left_behind()
        return here + sum(num or 0 for num in await self._ask_all("num_left_behind"))

    async def abort(self, scope: RequestScope) -> None:
        scope.aborted = True
        await asyncio.gather(self._order("abort", scope.number), self._conductor.abort(scope))

    async def pause(self, scope: RequestScope | None) -> None:
        """See `Episodes.pause`. If a worker does not answer in time, only logs a warning."""
        self._paused = True
        number = None if scope is None else scope.number
        await asyncio.gather(self._order("pause", number), self._conductor.pause(scope))

    def resume(self) -> None:
        self._paused = False
        self._conductor.resume()
        self._tell_all("resume")

    async def drain(self) -> None:
        await asyncio.gather(self._order("drain"), self._conductor.drain())

    async def close(self) -> None:
        self._closing = True
        try:
            await self._order("close", limit_s=CLOSE_LIMIT_S)
        finally:
            for member in self._members:
                member.port.kill()

    # ---- calls -----------------------------------------------------------------------------------------------------

    async def _order(self, method: str, *arguments: Any, limit_s: float = ORDER_LIMIT_S) -> None:
        """Sends a command to all workers. Waits until each has executed it, has died or has timed out."""
        members = list(self._members)
        await asyncio.gather(*(self._bounded(member, method, *arguments, limit_s=limit_s) for member in members))

    def _tell_all(self, method: str, *arguments: Any) -> None:
        for member in self._members:
            self._tell(member, method, *arguments)

    def _tell(self, member: _Member, method: str, *arguments: Any) -> None:
        """Sends a command in the background."""
        self._follow(member, self._bounded(member, method, *arguments))

    @staticmethod
    def _follow(member: _Member, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        order = asyncio.ensure_future(work)
        member.orders.add(order)
        order.add_done_callback(member.orders.discard)
        return order

    def _bounded(
        self, member: _Member, method: str, *arguments: Any, limit_s: float = ORDER_LIMIT_S
    ) -> Coroutine[Any, Any, None]:
        """Sends a command immediately. The returned coroutine waits until the worker has executed it."""
        port = member.port
        return self._obeyed(member, port, port.call(method, *arguments), method, limit_s)

    async def _obeyed(
        self, member: _Member, port: WorkerPort, answer: Awaitable[Any], method: str, limit_s: float
    ) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await answer
        except ActorDied as death:
            self._replace(member, port, death)
        except TimeoutError:
            logger.warning(
                "waited %.0f s for worker %d to %s; user code blocks its event loop", limit_s, member.number, method
            )
        except SlimeError as error:
            logger.warning("%s failed in rollout worker %d: %s", method, member.number, error)

    async def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """Returns the results of all workers; None for a worker that has died or does not answer in time."""
        return await asyncio.gather(*(self._asked(member, method, *arguments) for member in list(self._members)))

    async def _asked(self, member: _Member, method: str, *arguments: Any) -> Any:
        port = member.port
        try:
            async with asyncio.timeout(QUERY_LIMIT_S):
                return await port.call(method, *arguments)
        except ActorDied as death:
            self._replace(member, port, death)
        except TimeoutError:
            pass
        return None

    async def _counted(self, member: _Member) -> None:
        """Requests a worker's sums. Stores them even if they are late, because the worker reports them only once."""
        port = member.port
        try:
            sums: Sums | None = await port.call("traffic")
        except ActorDied as death:
            self._replace(member, port, death)
            return
        except SlimeError as error:  # its groups raise it as well
            logger.warning("cannot get request counts of rollout worker %d: %s", member.number, error)
            return
        if sums is not None:
            before = self._counts.get(member)
            self._counts[member] = sums if before is None else before.joined(sums)
