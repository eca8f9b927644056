"""Ray actor for the rollout side: `RolloutManager`, its workers, and routers if needed.

`RolloutActor` is an asyncio actor: generation, evaluation, saving and progress run concurrently, so a save never waits
for a generation. The driver's calls produce batches, metrics and the Data Buffer's checkpoint files. They wait on the
event loop for requests and graders to finish.

`EpisodeActor` is one rollout worker (`--rollout-num-workers`) in its own process, and `RayWorker` is its handle in the
rollout process. Calls are numbered and start in that order, which Ray alone does not guarantee. Workers exit with the
rollout process.

`set_apart` keeps the routed experts of a train batch in Ray's object store until a rank needs them. They make up most
of a batch (with 48 layers and top-8 routing: 384 values per token, versus 16 for everything else). Each rank only
fetches them for its own samples, and the ranks of a host share the fetched arrays.

Invariants
1. Requests go to an engine only after `admit` (its first verified weight sync) and never after `dismiss`.
2. The run sends its own requests directly to engines. Through a router, a client can neither choose nor find out which
   engine handles a request, and cannot abort it. Routers only run if other clients may use them (`needs_routers`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import RayError

from slime.agent.chat import ModelChats
from slime.cluster.host_actor import on_node
from slime.cluster.waiting import introduce, translated
from slime.core import blame
from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import ActorDied, WorkerStalled
from slime.core.processes import in_brackets
from slime.core.routed_experts import digests_of
from slime.core.text import NO_KEYS, EngineKeys
from slime.core.topology import ServedModel, Topology, Worker
from slime.observability.logs import ForDriver, setup_logging
from slime.observability.spans import start_recording
from slime.rollout.client.wire import allow_many_connections, collect_garbage_rarely
from slime.rollout.guard import LAST_WORDS, Watchdog, beside, last_words
from slime.rollout.manager import RolloutManager
from slime.rollout.sft import HeldOut
from slime.rollout.types import StepNews
from slime.rollout.workers.episode_worker import EpisodeWorker, InOrder
from slime.rollout.workers.worker_fleet import WorkerFleet
from slime.serving.router import AnyRouter, ExistingRouter, Router, Routers
from slime.settings import Args
from slime.settings.hook_contracts import runs_user_code
from slime.settings.topology_yaml import topology_of

MOST_CALLS = 100_000
"""Maximum number of concurrent calls to a worker. There is one call per group."""


@ray.remote(max_restarts=0, num_cpus=0, max_concurrency=MOST_CALLS)
class EpisodeActor:
    def __init__(self, args: Args, number: int, log_dir: str, keys: EngineKeys) -> None:
        setup_logging(Path(log_dir) / f"rollout_worker_{number}.log", crashes=True)
        self._spans = start_recording(
            f"rollout worker {number}",
            Path(log_dir).parent / "traces",
            endpoint=args.otlp_traces_endpoint,
            run_id=args.run_id,
        )
        allow_many_connections()
        stall = stall_file(log_dir, number)
        stall.unlink(missing_ok=True)  # left by this worker's previous process
        self._calls = InOrder(
            EpisodeWorker(args, args.rollout_num_workers, keys=keys, last_words=stall, open_chats=ModelChats)
        )
        collect_garbage_rarely()

    async def call(self, number: int, method: str, *arguments: Any) -> Any:
        """Calls a method of `EpisodeWorker`. `number`: the call's position in the order of calls, from 0."""
        return await self._calls.call(number, method, *arguments)


def stall_file(log_dir: str, number: int) -> Path:
    """Returns the file to which a worker writes what blocked its event loop before it exits."""
    return Path(log_dir) / f"rollout_worker_{number}_stall.txt"


class RayWorker:
    """`WorkerPort` backed by an `EpisodeActor`."""

    def __init__(self, actor: Any, number: int, stall: Path) -> None:
        self._actor, self._number, self._stall = actor, number, stall
        self._num_calls = 0

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        answer = self._actor.call.remote(self._num_calls, method, *arguments)
        self._num_calls += 1
        return self._answer(answer, method)

    def kill(self) -> None:
        ray.kill(self._actor)

    async def _answer(self, answer: Any, method: str) -> Any:
        try:
            return await answer
        except RayError as error:
            problem = translated(error, f"its call {method}")
            why = last_words(self._stall) if isinstance(problem, ActorDied) else None
            raise problem if why is None else WorkerStalled(why) from error


def worker_fleet(args: Args, log_dir: str, keys: EngineKeys) -> WorkerFleet | None:
    """Returns the rollout workers, if any. They run on this host because it has the user's modules."""
    if not args.rollout_num_workers:
        return None
    here = on_node(ray.get_runtime_context().get_node_id())
    actor: Any = EpisodeActor

    def start(number: int) -> RayWorker:
        worker = actor.options(**here).remote(args, number, log_dir, keys)
        process = blame.here(f"rollout worker {number}", Path(log_dir) / f"rollout_worker_{number}.log")
        return RayWorker(introduce(worker, process), number, stall_file(log_dir, number))

    return WorkerFleet(start, args.rollout_num_workers, start_limit_s=args.engine_start_timeout_s)


KEY_FILE = "router_key"
"""File in the run folder with the bearer token for engines and routers. Readable only by its owner."""
SETTLE_LIMIT_S = 30.0
"""How long `urls` waits for routers to register the admitted engines."""


def write_key(path: Path, key: str) -> None:
    """Writes the key to a file that only this user can read."""
    path.unlink(missing_ok=True)
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(key)


def needs_routers(args: Args) -> bool:
    """Returns whether any client might use a router.

    This is the case if the run only serves, if the user sets any router flag, or if the run has user code, which can
    read the address from `args.sglang_router_ip` and `args.sglang_router_port`.
    """
    given = any(args.was_given(name) for name in ("router_host", "router_port", "sglang_router_ip"))
    return args.num_rollout == 0 or given or bool(args.router) or runs_user_code(args)


def _routers(args: Args, topology: Topology, logs: Path, engine_key: str | None) -> Routers:
    """Starts one router per model. For the main model, uses --router-port, or the router at --sglang-router-ip."""
    key, main = args.router.get("api_key") or engine_key, topology.main

    def made(model: ServedModel) -> AnyRouter:
        alone = model == main
        if alone and args.sglang_router_ip is not None:
            return ExistingRouter(
                args.sglang_router_ip, int(args.sglang_router_port or 0), api_key=str(key), worker_api_key=engine_key
            )
        return Router(
            host=args.router_host,
            port=args.router_port if alone else None,
            log_path=logs / ("router.log" if alone else f"router_{model.name}.log"),
            extra_args={**args.router, "api_key": key},
            worker_api_key=engine_key,
            pairs=model.in_pairs,
        )

    return Routers({model.name: partial(made, model) for model in topology.models})


def _address(router: AnyRouter) -> tuple[str, int]:
    return in_brackets(router.host), router.port  # plugins format these as http://{ip}:{port}


@ray.remote(max_restarts=0, concurrency_groups={"watch": 1})
class RolloutActor:
    def __init__(self, args: Args, num_engines: int, log_dir: str, keys: EngineKeys = NO_KEYS) -> None:
        """`num_engines`: initial number of engines over all models."""
        setup_logging(Path(log_dir) / "rollout.log", crashes=True)
        self._for_driver = ForDriver()
        logging.getLogger().addHandler(self._for_driver)
        self._stall = Path(log_dir) / LAST_WORDS
        self._watchdog: Watchdog | None = None
        self._limit_s = args.execution_timeout_s
        self._compares_experts = args.use_prefix_sharing and args.use_rollout_routing_replay
        self._spans = start_recording(
            "rollout", Path(log_dir).parent / "traces", endpoint=args.otlp_traces_endpoint, run_id=args.run_id
        )
        self._routers: Routers | None = None
        self._has_settled = False
        self._readmits = args.eval_fleet is not None
        """Whether engines are admitted again before each evaluation."""
        if num_engines and (key := args.router.get("api_key") or keys.use):
            write_key(Path(log_dir).parent / KEY_FILE, key)
        if num_engines and needs_routers(args):
            topology = topology_of(args)
            self._routers = _routers(args, topology, Path(log_dir), keys.use)
            addresses = {model.name: _address(self._routers[model.name]) for model in topology.models}
            main = topology.main
            assert main is not None, "engines serve a model"
            others = [model.name for model in topology.models if model != main]
            self._model_names = [main.name, *others]
            ip, port = addresses[main.name]
            args = args.replace(sglang_router_ip=ip, sglang_router_port=port, sglang_model_routers=addresses)
        allow_many_connections()
        self._workers = worker_fleet(args, log_dir, keys) if num_engines else None
        engines: list[str] | None = [] if num_engines else None
        self._manager = RolloutManager(args, engines=engines, keys=keys, workers=self._workers, open_chats=ModelChats)
        collect_garbage_rarely()

    async def ready(self) -> tuple[str, ...]:
        """Waits until data and workers are ready. Returns the warnings about the data.

        Also starts the event loop's watchdog.
        """
        loop = asyncio.get_running_loop()
        self._watchdog = self._watchdog or Watchdog(loop, limit_s=self._limit_s, last_words=self._stall)
        if self._workers is not None:
            await self._workers.ready()
        return self._for_driver.take()

    async def ray_asks_for_token(self) -> bool:
        """Returns whether the Ray cluster requires a token. This process inherits the environment of Ray's daemons."""
        return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"

    async def admit(self, model: str, urls: list[str], worker: Worker = Worker.REGULAR) -> None:
        """Allows requests to these engines: immediately for the run's own requests, soon afterwards through routers.

        Does nothing for engines that are already admitted.
        """
        self._manager.admit(model, urls, worker)
        if self._routers is not None:
            self._routers.admit(model, urls, worker)

    async def dismiss(self, model: str, urls: list[str], died: bool = False) -> None:
        """Stops requests to engines that are leaving or have died.

        Running requests move to another engine or wait for one (`--engine-wait-s`). Unknown engines are ignored.
        """
        self._manager.dismiss(model, urls, died)
        if self._routers is not None:
            self._routers.dismiss(model, urls)

    async def stalled(self, within_s: float) -> list[str]:
        """Returns the engines that have not delivered a token to any request for `--request-timeout-s`.

        Only considers observations from the last `within_s` seconds.
        """
        return await self._manager.stalled(within_s)

    async def progressing(self, within_s: float) -> list[str]:
        """Returns the engines that delivered a token in the last `within_s` seconds."""
        return await self._manager.progressing(within_s)

    async def urls(self) -> dict[str, str]:
        """Returns model -> router URL, the main model first. Empty if no routers are running.

        First waits up to `SETTLE_LIMIT_S` for the routers to register the admitted engines.
        """
        if self._routers is None:
            return {}
        await beside(self._routers.settled, SETTLE_LIMIT_S)
        return {name: self._routers.url(name) for name in self._model_names}

    async def router_metrics(self) -> dict[str, str]:
        """Returns model -> HOST:PORT of the metrics of the routers that the run has started."""
        return {} if self._routers is None else self._routers.metrics_addresses()

    async def require_alive(self) -> None:
        """Raises `EngineError` if a router died and could not be restarted."""
        if self._routers is not None:
            self._routers.require_alive()

    async def generate(self, rollout_id: int) -> tuple[TrainBatch, StepNews]:
        await self._settle_once()
        begin_s = time.time()
        batch, metrics = await self._manager.generate(rollout_id)
        if self._watchdog is not None:
            theirs = await self._workers.longest_stall_s() if self._workers is not None else 0.0
            metrics = {**metrics, "perf/loop_stall_time": max(theirs, self._watchdog.take_longest_s())}
        shown = self._manager.showcase.take("rollout", rollout_id)
        news = StepNews(metrics, shown, (begin_s, time.time()), self._for_driver.take())
        return await beside(set_apart, batch, compared=self._compares_experts), news

    async def evaluate(self, rollout_id: int) -> StepNews:
        self._has_settled = self._has_settled and not self._readmits
        await self._settle_once()
        begin_s = time.time()
        metrics = await self._manager.evaluate(rollout_id)
        shown = self._manager.showcase.take("eval", rollout_id)
        return StepNews(metrics, shown, (begin_s, time.time()), self._for_driver.take())

    async def abandon_evaluation(self) -> None:
        """Cancels the running evaluation, whose call then raises `EngineError`."""
        await self._manager.abandon_evaluation()

    async def held_out(self) -> tuple[HeldOut, ...]:
        return await self._manager.held_out()

    async def probe(self) -> TrainBatch:
        return set_apart(await self._manager.probe(), compared=self._compares_experts)

    async def pause(self, hand_back: bool = True) -> None:
        """Aborts running requests before a weight sync and sends none until `resume`. `hand_back`: a save follows."""
        await self._manager.pause(hand_back=hand_back)

    async def resume(self) -> None:
        self._manager.resume()

    async def commit(self, rollout_id: int) -> dict[str, float]:
        """Records the step's batch as trained and returns the ledger."""
        return self._manager.commit(rollout_id)

    async def save(self, directory: str) -> None:
        await self._manager.save(Path(directory))

    async def load(self, directory: str) -> None:
        self._manager.load(Path(directory))

    @ray.method(concurrency_group="watch")
    async def progress(self) -> str:
        """Returns one line about what the rollout is doing or what is blocking its event loop.

        Runs on a separate event loop, so it works even if the main loop is blocked.
        """
        return (self._watchdog.stall if self._watchdog is not None else "") or self._manager.progress()

    async def stop(self) -> None:
        await self._manager.close()
        if self._routers is not None:
            await beside(self._routers.close)
        if self._watchdog is not None:
            self._watchdog.close()
        self._spans.close()

    async def _settle_once(self) -> None:
        """Waits once for the routers to register the engines, because user functions might use the routers."""
        if self._routers is not None and not self._has_settled:
            self._has_settled = True
            await beside(self._routers.settled, SETTLE_LIMIT_S)


@dataclass(frozen=True, slots=True)
class RemoteArray:
    """An array in Ray's object store (`slime.core.batch.Elsewhere`), freed with the last copy of this object."""

    ref: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    digests: npt.NDArray[np.uint64] | None = None

    @classmethod
    def of(cls, array: npt.NDArray[Any], *, compared: bool = False) -> RemoteArray:
        """Puts an array into the store. `compared`: also compute digests."""
        return cls(ray.put(array), array.shape, array.dtype, digests_of(array) if compared else None)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Fetches the array into this host's object store if needed, and returns a read-only view."""
        found = np.asarray(ray.get(self.ref), dtype=dtype)
        return found.copy() if copy else found


def set_apart(batch: TrainBatch, *, compared: bool = False) -> TrainBatch:
    """Returns the batch with its routed experts moved to the store.

    `compared`: add digests, so that ranks can compare routed experts without fetching them
    (`slime.data.shared_prefixes`).
    """
    return dataclasses.replace(batch, samples=tuple(_apart(s, compared) for s in batch.samples))


def _apart(sample: TrainSample, compared: bool) -> TrainSample:
    if not isinstance(sample.routed_experts, np.ndarray):
        return sample
    return dataclasses.replace(sample, routed_experts=RemoteArray.of(sample.routed_experts, compared=compared))
