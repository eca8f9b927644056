"""The laws of the worker of `--fully-async`, and random schedules to try them with, on a fake or on a real engine.

A schedule is a worker, a trainer that takes its time, weight syncs, evaluations, and a kill with a resume somewhere.
Laws: the ledger balances; nothing is trained twice; every batch is full; no trained token is older than the bound;
each token has the label of the weights that sampled it, told by the token itself; an evaluation is of one version.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any, Protocol

from slime.buffer.data_buffer import DataBuffer
from slime.core.sample import Fingerprint, PromptRow, Sample, Status
from slime.rewards.scores import Score, Scored, Unscored
from slime.rollout.client.engine_client import RequestScope
from slime.rollout.context import RolloutContext, use
from slime.rollout.evaluate import EvalDataset, evaluate
from slime.rollout.generate import generate
from slime.rollout.schedules.fully_async import RolloutWorker
from slime.rollout.types import Progress
from slime.settings.eval_config import EvalDatasetConfig
from tests.support.episode_workers import WorkerOf, Workers

NUM_ROWS = 500
FILTER = "slime.rollout.filters.check_reward_nonzero_std"
KILLED_EVERY_S = 5.0
HEAVY_TAILED = f"{__name__}:heavy_tailed"


class Engine(Protocol):
    """What a schedule drives: an engine that serves, under the version that the Data Buffer calls the newest."""

    client: Any
    """As `EngineClient`."""
    pace: float
    """Seconds for each second of the schedule."""

    async def sync_weights(self, version: int, scope: RequestScope | None = None) -> None:
        """Changes the weights while requests run; with `scope` the client ends its requests and pauses."""

    async def num_running(self) -> int:
        """Requests that the engine has."""

    def versions(self, sample: Sample) -> list[int]:
        """[R] the version that sampled each token, from the token and its log-prob alone."""


class Rows:
    """Endless enough."""

    fingerprint = Fingerprint(source="rows", num_rows=NUM_ROWS, digest="d")

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> PromptRow:
        return PromptRow(f"p{row}", (2, row % 100 + 3), label=row, metadata={}, source="")


@dataclasses.dataclass
class Graders:
    """Scores after a while; sometimes has no answer."""

    rng: random.Random
    pace: float

    async def close(self) -> None:
        """Nothing runs."""

    async def score(self, sample: Sample) -> Score:
        await asyncio.sleep(self.rng.random() / 4 * self.pace)
        return Unscored("slow") if self.rng.random() < 0.03 else Scored(float(self.rng.random() < 0.5))


async def heavy_tailed(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generates; how many tokens at most is a matter of the execution."""
    most = int(16 * random.Random(sample.index).paretovariate(1.0))
    return await generate(args, sample, {**sampling_params, "max_new_tokens": min(most, args.rollout_max_response_len)})


def held_out() -> EvalDataset:
    """Four prompts, two answers each."""
    own = {"n_samples_per_eval_prompt": 2, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_response_len": 6}
    fields = {f.name: None for f in dataclasses.fields(EvalDatasetConfig)}
    config = EvalDatasetConfig(**{**fields, "name": "held", "path": "", "skip_special_tokens": False, **own})
    return EvalDataset(config, [Rows()[row] for row in range(4)])


class Schedule:
    """One random run of `num_steps` steps."""

    def __init__(self, settings: Any, seed: int, *, num_steps: int, faults: bool, num_workers: int = 0) -> None:
        """`faults`: whether the engine fails in some schedules, and workers are killed. `num_workers`: of the rollout;
        0: its own process works on groups.
        """
        self.rng = rng = random.Random(seed)
        self.num_steps = num_steps
        batch, bound, samples = rng.randint(1, 3), rng.randint(0, 3), rng.randint(1, 3)
        self.args = settings.replace(
            rollout_batch_size=batch,
            n_samples_per_prompt=samples,
            max_weight_staleness=bound,
            max_groups_in_flight=batch + rng.randint(0, 2 * batch),
            rollout_max_response_len=rng.choice([4, 60]),
            partial_rollout=rng.random() < 0.7,
            dynamic_sampling_filter_path=FILTER if samples > 1 and rng.random() < 0.3 else None,
        )
        self.fault_rate = rng.choice([0.0, 0.0, 0.04]) if faults else 0.0
        self.trained: set[int] = set()
        self.killed_at = rng.randrange(num_steps) if rng.random() < 0.5 else None
        self.num_workers, self.num_killed = num_workers, 0
        self.num_evaluations = self.num_stale_tokens = self.num_mixed = 0

    def buffer(self, state: Any = None) -> DataBuffer:
        buffer = DataBuffer(Rows(), n_samples_per_prompt=self.args.n_samples_per_prompt, shuffle=True)
        buffer.max_staleness = self.args.max_weight_staleness
        if state is not None:
            buffer.load_state_dict(state)
        return buffer

    async def run(self, engine: Engine) -> None:
        """Trains `num_steps` batches on an engine that serves version 1."""
        state, step = await self._steps(engine, self.buffer(), 0, self.killed_at)
        if state is not None:
            buffer = self.buffer(state)
            await engine.sync_weights(buffer.weight_version)
            await self._steps(engine, buffer, step, None)
        assert len(self.trained) == self.num_steps * self.args.rollout_batch_size, "a group was trained twice or never"

    async def _steps(self, engine: Engine, buffer: DataBuffer, start: int, killed_at: int | None) -> tuple[Any, int]:
        """-> (state of the buffer at the kill, the step to go on with)."""
        rng, pace = self.rng, engine.pace
        graders: Any = Graders(random.Random(rng.random()), pace)
        loop = asyncio.get_running_loop()
        workers = Workers(lambda: WorkerOf(self.args, engine.client, graders), self.num_workers)
        context = RolloutContext(self.args, engine.client, None, graders, Progress(), loop, eval_datasets=(held_out(),))
        if self.num_workers:
            context = dataclasses.replace(context, workers=workers.fleet)
        worker = RolloutWorker(context, buffer)
        killing = asyncio.create_task(workers.kill_now_and_then(rng, KILLED_EVERY_S * pace))
        if not self.fault_rate:
            killing.cancel()
        try:
            for step in range(start, self.num_steps):
                if step == killed_at and rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * pace)
                    return buffer.state_dict(), step
                output = await worker.step(context, step)
                if step == killed_at and rng.random() < 0.5:
                    return buffer.state_dict(), step
                await asyncio.sleep(rng.choice([0.0, 0.3, 3.0]) * pace)
                self._train(engine, output.samples, buffer)
                assert len(worker.running) + buffer.num_finished <= self.args.max_groups_in_flight, "beyond the bound"
                if step == killed_at:
                    return buffer.state_dict(), step + 1
                await engine.sync_weights(buffer.weight_version, worker.scope if rng.random() < 0.5 else None)
                if rng.random() < 0.3 and not self.fault_rate:
                    await self._evaluate(context, step, buffer.weight_version)
        finally:
            await worker.close()
            killing.cancel()
            self.num_killed += max(0, len(workers.started) - self.num_workers)
            assert await engine.num_running() == 0, "a request outlived the worker"
            await workers.fleet.close()
        buffer.ledger().check()
        assert not buffer.in_flight
        return None, self.num_steps

    async def _evaluate(self, context: RolloutContext, step: int, version: int) -> None:
        with use(context):
            metrics = (await evaluate(dataclasses.replace(context, progress=Progress()), step)).metrics
        assert metrics["eval/weight_version"] == version, metrics
        self.num_evaluations += 1

    def _train(self, engine: Engine, groups: list[list[Sample]], buffer: DataBuffer) -> None:
        assert len(groups) == self.args.rollout_batch_size, "not a batch"
        indices = {s.group_index for group in groups for s in group if s.group_index is not None}
        assert len(indices) == len(groups) and not indices & self.trained, f"trained twice: {indices & self.trained}"
        now = buffer.weight_version
        for sample in (s for group in groups for s in group):
            assert sample.status in (Status.COMPLETED, Status.TRUNCATED), sample
            assert len(sample.tokens) - sample.prompt_length == len(sample.token_versions or ()), sample
            assert sample.token_versions == engine.versions(sample), "a label is not of what sampled the token"
            assert sample.token_versions == sorted(sample.token_versions), "older weights continued newer ones"
            ages = [now - version for version in sample.token_versions]
            assert all(0 <= age <= self.args.max_weight_staleness for age in ages), f"too old, or of the future: {ages}"
            self.num_stale_tokens += sum(age > 0 for age in ages)
            self.num_mixed += len(set(ages)) > 1
        buffer.mark_trained(indices)
        buffer.weight_version += 1
        buffer.ledger().check()
        self.trained |= indices
