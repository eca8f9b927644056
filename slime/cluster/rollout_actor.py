"""The rollout side as one actor: `RolloutManager` and the router in front of the engines.

An asyncio actor: generation, evaluation, saving and progress run side by side, so that a save never waits for a
generation to end. Consumes: calls of the driver. Produces: batches, metrics, and the Data Buffer's part of checkpoints.
Waits for: what the manager's schedule waits for, and for the router at the start. Is woken by: the driver's calls, and
on its event loop by the end of requests and gradings. The router forwards to an engine only after `admit` (its first
verified weight sync).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import ray

from slime.core.batch import TrainBatch
from slime.observability.logs import setup_logging
from slime.rollout.held_out import HeldOut
from slime.rollout.manager import RolloutManager
from slime.rollout.types import StepNews
from slime.serving.router import Router
from slime.settings import Args


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
                extra_args=args.router,
                worker_api_key=api_key,
            )
            self._router.start()
            self._router.wait_ready(args.engine_start_timeout_s)
            args = args.replace(sglang_router_ip=self._router.host, sglang_router_port=self._router.port)
        url = self._router.url if self._router is not None else None
        self._manager = RolloutManager(args, router_url=url, num_engines=num_engines, api_key=api_key)

    async def ready(self) -> int:
        """Number of prompts in the training data; answers when the data is loaded."""
        return self._manager.num_prompts

    async def admit(self, urls: list[str]) -> None:
        """Lets traffic reach these engines."""
        if self._router is not None:
            for url in urls:
                await asyncio.to_thread(self._router.add_worker, url)

    async def dismiss(self, urls: list[str]) -> None:
        """Nothing goes to these engines any more; they may be gone already."""
        if self._router is not None:
            for url in urls:
                await asyncio.to_thread(self._router.remove_worker, url)

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

    async def pause(self) -> None:
        """Ends requests before a weight sync; no other is sent until `resume`."""
        await self._manager.pause()

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
