"""A worker of the rollout as an actor: `EpisodeWorker` in a process of its own, and how the rollout calls it.

Consumes: calls of the rollout's process, any number side by side; they are numbered, because Ray may begin a later one
first, and begin in that order (`in_order`). Produces: groups that have been worked on. Waits for: what their episodes
wait for. Is woken by: the rollout's calls, and on its event loop by the ends of requests and gradings. It ends with the
rollout's process, whose actor it is.
"""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from slime.cluster.failures import introduce, translated
from slime.cluster.slots import on_node
from slime.core import blame
from slime.core.errors import ActorDied, WorkerStalled
from slime.core.text import EngineKeys
from slime.observability.logs import setup_logging
from slime.observability.spans import start_recording
from slime.rollout.client.wire import allow_many_connections, collect_garbage_rarely
from slime.rollout.guard import last_words
from slime.rollout.workers.episode_worker import EpisodeWorker, InOrder
from slime.rollout.workers.fleet import WorkerFleet
from slime.settings import Args

MOST_CALLS = 100_000
"""Calls of a worker that run side by side; each group is one."""


@ray.remote(max_restarts=0, num_cpus=0, max_concurrency=MOST_CALLS)
class EpisodeActor:
    """Shell around `EpisodeWorker`."""

    def __init__(self, args: Args, number: int, log_dir: str, keys: EngineKeys) -> None:
        setup_logging(Path(log_dir) / f"rollout_worker_{number}.log", crashes=True)
        self._spans = start_recording(f"rollout worker {number}", Path(log_dir).parent / "traces")
        allow_many_connections()
        stall = stall_file(log_dir, number)
        stall.unlink(missing_ok=True)  # of the process before
        self._calls = InOrder(EpisodeWorker(args, args.rollout_num_workers, keys=keys, last_words=stall))
        collect_garbage_rarely()

    async def call(self, number: int, method: str, *arguments: Any) -> Any:
        """Of `EpisodeWorker`; the first number is 0."""
        return await self._calls.call(number, method, *arguments)


def stall_file(log_dir: str, number: int) -> Path:
    """Where a worker writes what kept its event loop from turning until it had to end."""
    return Path(log_dir) / f"rollout_worker_{number}_stall.txt"


class RayWorker:
    """An `EpisodeActor` as `WorkerFleet` calls it."""

    def __init__(self, actor: Any, number: int, stall: Path) -> None:
        self._actor, self._number, self._stall = actor, number, stall
        self._num_calls = 0

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """See `WorkerPort`."""
        answer = self._actor.call.remote(self._num_calls, method, *arguments)
        self._num_calls += 1
        return self._answer(answer, method)

    def kill(self) -> None:
        """See `WorkerPort`."""
        ray.kill(self._actor)

    async def _answer(self, answer: Any, method: str) -> Any:
        try:
            return await answer
        except RayError as error:
            problem = translated(error, f"its call {method}")
            why = last_words(self._stall) if isinstance(problem, ActorDied) else None
            raise problem if why is None else WorkerStalled(why) from error


def worker_fleet(args: Args, log_dir: str, keys: EngineKeys) -> WorkerFleet | None:
    """The workers of `--rollout-num-workers`, on this host, where the data and the user's modules are; None for 0."""
    if not args.rollout_num_workers:
        return None
    here = on_node(ray.get_runtime_context().get_node_id())
    actor: Any = EpisodeActor

    def start(number: int) -> RayWorker:
        worker = actor.options(**here).remote(args, number, log_dir, keys)
        process = blame.here(f"rollout worker {number}", Path(log_dir) / f"rollout_worker_{number}.log")
        return RayWorker(introduce(worker, process), number, stall_file(log_dir, number))

    return WorkerFleet(start, args.rollout_num_workers, start_limit_s=args.engine_start_timeout_s)
