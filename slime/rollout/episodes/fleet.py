"""`WorkerFleet`: groups are worked on in worker processes, of which each has what episodes need (`worker`).

Consumes: groups of a loop, engines that come and go, orders to end requests. Produces: a `GroupResult` for each group,
whose tokens nobody here looks into. A call waits for the worker that has its group, and is woken by its answer, by its
end, or by a cancellation, which it hands on. All on the event loop of the rollout's process (the conductor).

Invariants
1. A group goes to the worker with the fewest. When a worker dies, each of its groups comes back as a failed try, as it
   was issued, and another worker is started in its place, with the engines and the pause of this moment. None is lost.
2. Orders reach a worker in the order in which they were given.
3. A worker that dies `MAX_DEATHS` times in a row without having finished a group ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from slime.core.errors import ActorDied, DeadlineExceeded
from slime.core.sample import Group, Sample
from slime.core.topology import Worker
from slime.rollout.context import RolloutContext
from slime.rollout.episodes.here import Episodes
from slime.rollout.episodes.work import Done, Work
from slime.rollout.execute import Execution, GroupResult, Outcome
from slime.rollout.hooks import RolloutHooks
from slime.rollout.progress import waiting
from slime.rollout.scope import RequestScope
from slime.rollout.traffic import Sums

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""One more try of its groups would drop them as failed (`group_loop`)."""
ORDER_LIMIT_S = 60.0
"""How long a worker may take to end requests, or a group; its code may hold its event loop."""
QUESTION_LIMIT_S = 2.0
"""How long a worker may take to say what it sees."""
START_LIMIT_S = 300.0


class WorkerPort(Protocol):
    """A worker process, as it is called from here."""

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Calls a method of its `EpisodeWorker`; calls begin there in the order in which they were made here.

        The answer raises `ActorDied` if the process is gone, and what the method raised.
        """

    def kill(self) -> None:
        """Ends the process at once."""


@dataclass(slots=True, eq=False)
class _Member:
    """A worker, whatever process it is."""

    number: int
    port: WorkerPort
    num_running: int = 0
    num_deaths: int = 0
    """In a row, without a finished group."""
    orders: set[asyncio.Future[Any]] = field(default_factory=set)
    """Whose answers nobody waits for."""


class WorkerFleet(Episodes):
    """All workers of a run. Use on one event loop; `close` at the end."""

    def __init__(self, start: Callable[[int], WorkerPort], num_workers: int) -> None:
        """`start`: makes the process of a worker, by its number, and returns at once."""
        self._start, self._num_workers = start, num_workers
        self._members: list[_Member] = []
        """Started when they are first asked for something; then they get to know what was said before."""
        self._numbers = count(1)
        self._admitted: dict[tuple[str, str], Worker] = {}
        """(model, engine) -> what it does of a request."""
        self._paused = False

    async def ready(self) -> None:
        """Answers when all workers are made. Raises what a constructor raised, and `DeadlineExceeded`."""
        self._begin()
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await asyncio.gather(*(member.port.call("ready") for member in self._members))
        except TimeoutError as late:
            raise DeadlineExceeded(
                f"waited {START_LIMIT_S:.0f} s for {self._num_workers} rollout workers to start"
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
        """See `Episodes`. The hooks are the workers' own."""
        group.pack()
        try:
            done = await self._done(Work(next(self._numbers), scope.number, context.rollout_id, params, group))
        except _WorkerLost as loss:
            return GroupResult(group, Outcome.FAILED, context.progress.failed(str(loss)))
        context.progress.add(done.progress)
        return GroupResult(done.record, done.outcome, done.reason, done.verdict)

    async def evaluate(
        self, context: RolloutContext, sample: Sample, params: Mapping[str, Any], hooks: RolloutHooks
    ) -> Execution:
        """See `Episodes`."""
        sample.pack()
        group = Group(sample.group_index or 0, (sample,))
        try:
            done = await self._done(Work(next(self._numbers), None, context.rollout_id, params, group))
        except _WorkerLost as loss:
            return Execution([sample], Outcome.FAILED, context.progress.failed(str(loss)))
        context.progress.add(done.progress)
        return Execution(list(done.record.group().samples), done.outcome, done.reason)

    async def _done(self, work: Work) -> Done:
        """Raises `_WorkerLost` if the worker died, and what ends the run."""
        self._begin()
        member = min(self._members, key=lambda one: one.num_running)
        port = member.port
        member.num_running += 1
        try:
            with waiting():  # its executions have limits of their own, there
                done: Done = await port.call("run", work)
        except asyncio.CancelledError:
            await self._bounded(port.call("cancel", work.number), f"worker {member.number} to end a group")
            raise
        except ActorDied as death:
            self._replace(member, port, death)
            raise _WorkerLost(f"worker died: {death}") from death
        finally:
            member.num_running -= 1
        member.num_deaths = 0
        return done

    def _replace(self, member: _Member, port: WorkerPort, death: ActorDied) -> None:
        """Another process takes the place of a dead one; the first of its groups that hears of it starts it."""
        if member.port is not port:
            return
        member.num_deaths += 1
        if member.num_deaths >= MAX_DEATHS:
            raise ActorDied(
                f"got rollout worker {member.number} dead {member.num_deaths} times in a row without a finished group, "
                f"the last time because: {death}; look into its log: the code of an episode ends its process, or "
                "memory runs out"
            ) from death
        logger.warning("rollout worker %d is gone, and is started again: %s", member.number, death)
        member.port = self._start(member.number)
        self._tell_state(member)

    def _begin(self) -> None:
        if not self._members:
            self._members = [_Member(number, self._start(number)) for number in range(self._num_workers)]
            for member in self._members:
                self._tell_state(member)

    def _tell_state(self, member: _Member) -> None:
        """What a new process has to know."""
        self._tell(member, "ready")
        for (model, url), worker in self._admitted.items():
            self._tell(member, "admit", model, [url], worker)
        if self._paused:
            self._tell(member, "pause", None)

    # ---- engines and requests --------------------------------------------------------------------------------------

    def admit(self, model: str, urls: Sequence[str], worker: Worker) -> None:
        """Requests to this model may go to these engines."""
        self._admitted |= {(model, url): worker for url in urls}
        self._tell_all("admit", model, list(urls), worker)

    def dismiss(self, model: str, urls: Sequence[str]) -> None:
        """These engines are gone, or go."""
        for url in urls:
            self._admitted.pop((model, url), None)
        self._tell_all("dismiss", model, list(urls))

    async def stalled(self, within_s: float) -> list[str]:
        """Engines that bring the requests of a worker no token. Who does not answer at once has seen none."""
        seen = await asyncio.gather(*(self._asked(member.port.call("stalled", within_s)) for member in self._members))
        return [url for urls in seen for url in urls or ()]

    async def longest_stall_s(self) -> float:
        """The longest time since the last call in which the event loop of a worker did not turn, seconds."""
        calls = [self._asked(member.port.call("longest_stall_s")) for member in self._members]
        return max((s for s in await asyncio.gather(*calls) if s is not None), default=0.0)

    async def traffic(self) -> list[Sums]:
        """What the requests of the workers waited for, of those who answer at once."""
        seen = await asyncio.gather(*(self._asked(member.port.call("traffic")) for member in self._members))
        return [sums for sums in seen if sums is not None]

    async def abort(self, scope: RequestScope) -> None:
        """See `Episodes`."""
        scope.aborted = True
        await self._order("abort", scope.number)

    async def pause(self, scope: RequestScope | None) -> None:
        """See `Episodes`. Also where a worker does not answer in time, which is logged."""
        self._paused = True
        await self._order("pause", None if scope is None else scope.number)

    def resume(self) -> None:
        """See `Episodes`."""
        self._paused = False
        self._tell_all("resume")

    async def drain(self) -> None:
        """See `Episodes`."""
        await self._order("drain")

    async def close(self) -> None:
        """Ends all workers."""
        await self._order("close")
        for member in self._members:
            member.port.kill()

    # ---- calls -----------------------------------------------------------------------------------------------------

    async def _order(self, method: str, *arguments: Any) -> None:
        """Gives all workers an order, and waits for each until it is done, the worker is gone, or it takes too long."""
        given = [
            self._bounded(member.port.call(method, *arguments), f"worker {member.number} to {method}")
            for member in self._members
        ]
        await asyncio.gather(*given)

    def _tell_all(self, method: str, *arguments: Any) -> None:
        for member in self._members:
            self._tell(member, method, *arguments)

    def _tell(self, member: _Member, method: str, *arguments: Any) -> None:
        """Gives an order whose end nobody waits for."""
        order = asyncio.ensure_future(
            self._bounded(member.port.call(method, *arguments), f"worker {member.number} to {method}")
        )
        member.orders.add(order)
        order.add_done_callback(member.orders.discard)

    @staticmethod
    async def _bounded(answer: Awaitable[Any], what: str) -> None:
        try:
            async with asyncio.timeout(ORDER_LIMIT_S):
                await answer
        except ActorDied:
            return  # its groups hear of it, too
        except TimeoutError:
            logger.warning("waited %.0f s for %s; its code holds its event loop", ORDER_LIMIT_S, what)

    @staticmethod
    async def _asked(answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(QUESTION_LIMIT_S):
                return await answer
        except (ActorDied, TimeoutError):
            return None


class _WorkerLost(Exception):
    """The worker of a group died."""
