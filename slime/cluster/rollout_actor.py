"""The rollout side as one actor: `RolloutManager` and the router in front of the engines.

An asyncio actor: generation, evaluation, saving and progress run side by side, so that a save never waits for a
generation to end. Consumes: calls of the driver. Produces: batches, metrics, and the Data Buffer's part of checkpoints.
Waits for: what the manager's schedule waits for, and for the router at the start. Is woken by: the driver's calls, and
on its event loop by the end of requests and gradings.

Invariants
1. Requests go to an engine only after `admit` (its first verified weight sync), and never after `dismiss`. Ours go
   there directly, because the router neither says nor lets choose which engine has a request, and hands on no abort;
   it is for others.
2. The router asks for a key, which is the engines' own: with none it would take anybody's servers, and hand them the
   key and the requests.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import ray

from slime.core.batch import TrainBatch
from slime.observability.logs import setup_logging
from slime.rollout.held_out import HeldOut
from slime.rollout.manager import RolloutManager
from slime.rollout.types import StepNews
from slime.rollout.wire import allow_many_connections, collect_garbage_rarely
from slime.serving.router import Router
from slime.settings import Args

KEY_FILE = "router_key"
"""In the run folder, for its owner's eyes: what others send to the router as their bearer token."""


def write_key(path: Path, key: str) -> None:
    """Writes the key where only this user can read it."""
    path.unlink(missing_ok=True)
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(key)


@ray.remote(max_restarts=0)
class RolloutActor:
    """Shell around `RolloutManager` and `Router`."""

    def __init__(self, args: Args, num_engines: int, log_dir: str, api_key: str | None = None) -> None:
        """`api_key`: the token that the engines ask for."""
        setup_logging(Path(log_dir) / "rollout.log")
        self._router: Router | None = None
        if num_engines:
            self._router = Router(
                host=args.router_host,
                port=args.router_port,
                log_path=Path(log_dir) / "router.log",
                extra_args={**args.router, "api_key": args.router.get("api_key") or api_key},
                worker_api_key=api_key,
            )
            write_key(Path(log_dir).parent / KEY_FILE, self._router.api_key)
            self._router.start()
            self._router.wait_ready(args.engine_start_timeout_s)
            args = args.replace(sglang_router_ip=self._router.host, sglang_router_port=self._router.port)
        allow_many_connections()
        self._manager = RolloutManager(args, engines=[] if num_engines else None, api_key=api_key)
        collect_garbage_rarely()

    async def ready(self) -> int:
        """Number of prompts in the training data; answers when the data is loaded."""
        return self._manager.num_prompts

    async def admit(self, urls: list[str]) -> None:
        """Lets traffic reach these engines, our own at once and that of others through the router. Known ones stay."""
        self._manager.admit(urls)
        if self._router is not None:
            await asyncio.gather(*(asyncio.to_thread(self._router.add_worker, url) for url in urls))

    async def dismiss(self, urls: list[str]) -> None:
        """These engines are dead, or go: no traffic reaches them, and requests that run there go on at another one.

        Without another one they wait (`--engine-wait-s`). Ones that are not known are not an error.
        """
        self._manager.dismiss(urls)
        if self._router is not None:
            await asyncio.gather(*(asyncio.to_thread(self._router.remove_worker, url) for url in urls))

    async def url(self) -> str | None:
        """The router; None without engines."""
        return None if self._router is None else self._router.url

    async def require_alive(self) -> None:
        """Raises `EngineError` if the router has ended."""
        if self._router is not None:
            self._router.require_alive()

    async def generate(self, rollout_id: int) -> tuple[TrainBatch, StepNews]:
        begin_s = time.time()
        batch, metrics = await self._manager.generate(rollout_id)
        news = StepNews(metrics, self._manager.showcase.take("rollout", rollout_id), (begin_s, time.time()))
        return batch, news

    async def evaluate(self, rollout_id: int) -> StepNews:
        metrics = await self._manager.evaluate(rollout_id)
        return StepNews(metrics, self._manager.showcase.take("eval", rollout_id))

    async def held_out(self) -> tuple[HeldOut, ...]:
        return await self._manager.held_out()

    async def probe(self) -> TrainBatch:
        return await self._manager.probe()

    async def pause(self, hand_back: bool = True) -> None:
        """Ends requests before a weight sync; no other is sent until `resume`. `hand_back`: a save follows."""
        await self._manager.pause(hand_back=hand_back)

    async def resume(self) -> None:
        self._manager.resume()

    async def commit(self, rollout_id: int) -> dict[str, float]:
        """The batch of this step is trained; returns the ledger."""
        return self._manager.commit(rollout_id)

    async def save(self, directory: str) -> None:
        await self._manager.save(Path(directory))

    async def load(self, directory: str) -> None:
        self._manager.load(Path(directory))

    async def progress(self) -> str:
        """One line: what the rollout is doing now."""
        return self._manager.progress()

    async def stop(self) -> None:
        await self._manager.close()
        if self._router is not None:
            self._router.stop()
