"""Workers of the rollout on the event loop of the test: everything that goes to one, or comes from it, is pickled, and
calls come in any order.
"""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Awaitable, Callable
from typing import Any

from slime.core.errors import ActorDied
from slime.core.sample import Group
from slime.rollout.context import Models
from slime.rollout.loopback_router import LoopbackRouter
from slime.rollout.manager import RolloutManager
from slime.rollout.user_functions import RolloutHooks
from slime.rollout.workers.episode_worker import EpisodeWorker, InOrder
from slime.rollout.workers.worker_fleet import WorkerFleet
from tests.support.fake_engine import FakeEngine, serve


class PickledWorker:
    """A worker that can be killed: it does nothing any more, and whoever waits for it hears of its end."""

    def __init__(self, worker: EpisodeWorker) -> None:
        self.worker = worker
        self._in_order, self._num_calls = InOrder(worker), 0
        self._delays = random.Random(5)
        self.groups: list[Group] = []
        """That it was asked to work on."""
        self.num_done = 0
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_dead = False

    @property
    def num_groups(self) -> int:
        """That it was asked to work on."""
        return len(self.groups)

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """See `WorkerPort`."""
        given = pickle.dumps(arguments)
        if method == "run":
            self.groups.append(arguments[0].group)
        task = asyncio.create_task(self._called(self._num_calls, method, given))
        self._num_calls += 1
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return self._answer(task)

    def kill(self) -> None:
        """See `WorkerPort`."""
        self._is_dead = True
        for task in self._calls:
            task.cancel()

    async def _called(self, number: int, method: str, given: bytes) -> bytes:
        for _ in range(self._delays.randrange(3)):
            await asyncio.sleep(0)
        if self._is_dead:
            raise asyncio.CancelledError
        done = pickle.dumps(await self._in_order.call(number, method, *pickle.loads(given)))
        self.num_done += method == "run"
        return done

    async def _answer(self, task: asyncio.Task[bytes]) -> Any:
        try:
            return pickle.loads(await asyncio.shield(task))
        except asyncio.CancelledError:
            if not self._is_dead:
                raise
            raise ActorDied("a worker of the rollout was killed") from None


class WorkerOf(EpisodeWorker):
    """A worker that has its client and its graders from the test."""

    def __init__(self, args: Any, client: Any, graders: Any) -> None:
        self._args, self._hooks = args, RolloutHooks.load(args)
        self._client = self._eval_client = client
        self._clients = self._models = self._eval_models = Models()
        self._graders, self._scopes, self._running = graders, {}, {}
        self._loopback = LoopbackRouter(args, {})
        self._tokenizer = self._teacher = self._last_words = self._watchdog = None


class Workers:
    """Of a test: the processes in the order of their start."""

    def __init__(self, make: Callable[[], EpisodeWorker], num: int) -> None:
        self.started: list[PickledWorker] = []
        self.fleet = WorkerFleet(lambda _: self._start(make()), num)

    def _start(self, worker: EpisodeWorker) -> PickledWorker:
        self.started.append(PickledWorker(worker))
        return self.started[-1]

    async def kill_now_and_then(self, rng: random.Random, most_s: float) -> None:
        """Kills workers that have finished a group since they were started, until it is cancelled."""
        while True:
            await asyncio.sleep(rng.uniform(0.0, most_s))
            for one in self.started:
                if one.num_done > rng.choice((0, 1, 2)):
                    one.kill()

    async def close(self) -> None:
        """Ends what the killed ones left: their clients and graders, which a process would have taken with it."""
        for one in self.started:
            await one.worker.close()


async def with_workers(
    args: Any,
    engine: FakeEngine,
    num: int,
    work: Callable[[RolloutManager, Workers], Awaitable[Any]],
    kind: type[EpisodeWorker] = EpisodeWorker,
) -> Any:
    """Runs `work` on a manager with so many workers of a kind, whose engine is the fake one."""
    async with serve(engine):
        workers = Workers(lambda: kind(pickle.loads(pickle.dumps(args)), num), num)
        manager = RolloutManager(args, engines=[engine.url], workers=workers.fleet)
        try:
            return await work(manager, workers)
        finally:
            await manager.close()
            await workers.close()
