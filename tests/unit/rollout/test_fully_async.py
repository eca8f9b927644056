"""The worker of `--fully-async`, under random schedules on a fake clock and an engine that keeps the protocol.

Whatever ends when: the ledger balances, nothing is trained twice, no trained token is older than the bound, each token
has the version that sampled it, and a resume continues with every prompt that was not trained.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from slime.buffer.data_buffer import DataBuffer
from slime.core.errors import ConfigError, EngineError, HookError
from slime.core.prompt import Fingerprint, PromptRow
from slime.core.sample import Sample, Status
from slime.rewards.types import Score, Scored, Unscored
from slime.rollout.context import RolloutContext
from slime.rollout.fully_async import RolloutWorker
from slime.rollout.manager import RolloutManager
from slime.rollout.types import Progress
from tests.support.fake_clock import InProcessEngine, run_on_fake_clock
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import rollout_args, with_manager

NUM_STEPS = 5
HOOKS = str(Path(__file__).with_name("rollout_hooks.py"))


class Rows:
    """Endless enough."""

    fingerprint = Fingerprint(source="rows", num_rows=500, digest="d")

    def __len__(self) -> int:
        return 500

    def __getitem__(self, row: int) -> PromptRow:
        return PromptRow(f"p{row}", (2, row + 3), label=row, metadata={}, source="")


@dataclasses.dataclass
class Graders:
    """Scores after a while; sometimes has no answer."""

    rng: random.Random

    async def score(self, sample: Sample) -> Score:
        await asyncio.sleep(self.rng.random() / 4)
        return Unscored("slow") if self.rng.random() < 0.03 else Scored(float(self.rng.random() < 0.5))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("fully-async")
    return rollout_args(path, "--fully-async", "--rm-type", "random", synchronous=False)


class Schedule:
    """One random run: a worker, a trainer, publications, and a kill with a resume somewhere."""

    def __init__(self, settings: Any, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        batch, bound = rng.randint(1, 3), rng.randint(0, 3)
        self.args = settings.replace(
            rollout_batch_size=batch,
            n_samples_per_prompt=rng.randint(1, 3),
            max_weight_staleness=bound,
            max_groups_in_flight=batch + rng.randint(0, 2 * batch),
            rollout_max_response_len=rng.choice([4, 60]),
            partial_rollout=rng.random() < 0.7,
        )
        self.pause_mode = rng.choice(["abort", "in_place"])
        self.faults = rng.choice([0.0, 0.0, 0.04])
        self.trained: set[int] = set()
        self.killed_at = rng.randrange(NUM_STEPS) if rng.random() < 0.5 else None

    def buffer(self, state: Any = None) -> DataBuffer:
        buffer = DataBuffer(Rows(), n_samples_per_prompt=self.args.n_samples_per_prompt, shuffle=True)
        buffer.max_staleness = self.args.max_weight_staleness
        if state is not None:
            buffer.load_state_dict(state)
        return buffer

    async def run(self) -> None:
        state, step = await self.steps(self.buffer(), 0, self.killed_at)
        if state is not None:
            await self.steps(self.buffer(state), step, None)
        assert len(self.trained) == NUM_STEPS * self.args.rollout_batch_size, "a group was trained twice or never"

    async def steps(self, buffer: DataBuffer, start: int, killed_at: int | None) -> tuple[Any, int]:
        engine = InProcessEngine(self.rng, self.faults, version=buffer.weight_version, pause_mode=self.pause_mode)
        progress, loop = Progress(), asyncio.get_running_loop()
        graders: Any = Graders(self.rng)
        client: Any = engine
        context = RolloutContext(self.args, client, None, graders, progress, loop)
        worker = RolloutWorker(context, buffer)
        try:
            for step in range(start, NUM_STEPS):
                output = await worker.step(context, step)
                if step == killed_at and self.rng.random() < 0.5:
                    return buffer.state_dict(), step
                await asyncio.sleep(self.rng.choice([0.0, 0.3, 3.0]))
                self.train(output.samples, buffer)
                assert len(worker.running) + buffer.num_finished <= self.args.max_groups_in_flight, "beyond the bound"
                if step == killed_at:
                    return buffer.state_dict(), step + 1
                await engine.publish(buffer.weight_version)
        finally:
            await worker.close()
            assert engine.num_running == 0, "a request outlived the worker"
        buffer.ledger().check(max_in_flight=0)
        return None, NUM_STEPS

    def train(self, groups: list[list[Sample]], buffer: DataBuffer) -> None:
        assert len(groups) == self.args.rollout_batch_size, "not a batch"
        indices = {s.group_index for group in groups for s in group if s.group_index is not None}
        assert len(indices) == len(groups) and not indices & self.trained, f"trained twice: {indices & self.trained}"
        for sample in (s for group in groups for s in group):
            assert sample.status in (Status.COMPLETED, Status.TRUNCATED), sample
            response = sample.tokens[sample.prompt_length :]
            assert sample.token_versions == [t // 1000 for t in response], "a label is not of what sampled the token"
            oldest = min(sample.token_versions, default=buffer.weight_version)
            assert buffer.weight_version - oldest <= self.args.max_weight_staleness, "too old"
        buffer.mark_trained(indices)
        buffer.weight_version += 1
        buffer.ledger().check()
        self.trained |= indices


def run_schedules(settings: Any, seeds: range) -> None:
    logging.disable(logging.WARNING)
    try:
        for seed in seeds:
            try:
                run_on_fake_clock(Schedule(settings, seed).run())
            except EngineError as error:
                assert "failed groups in step" in str(error), f"seed {seed}"
            except BaseException as error:
                error.add_note(f"schedule {seed}")
                raise
    finally:
        logging.disable(logging.NOTSET)


def test_the_laws_hold_under_random_schedules(settings: Any) -> None:
    run_schedules(settings, range(100))


@pytest.mark.slow
def test_the_laws_hold_under_many_random_schedules(settings: Any) -> None:
    run_schedules(settings, range(100, 4000))


def test_steps_through_the_manager_train_what_is_finished_and_count_how_old_it_is(tmp_path: Path) -> None:
    engine = FakeEngine(tick_s=0.001, stop_after=4)

    async def work(manager: RolloutManager) -> Any:
        seen, metrics = [], []
        for step in range(3):
            batch, figures = await manager.generate(step)
            metrics.append(figures)
            seen += sorted({s.group_index for s in batch.samples})
            manager.commit(step)
            manager.save(tmp_path)
            engine.weight_version = str(step + 2)
        return seen, metrics

    args = rollout_args(tmp_path, "--custom-rm-path", f"{HOOKS}:reward", "--fully-async", synchronous=False)
    assert (args.max_weight_staleness, args.max_groups_in_flight) == (2, 8) and args.partial_rollout and args.use_tis
    seen, metrics = asyncio.run(with_manager(args, engine, work))
    assert len(seen) == len(set(seen)) == 12
    assert all(0 <= m["rollout/staleness/mean"] <= m["rollout/staleness/max"] <= 2 for m in metrics)
    assert metrics[-1]["rollout/staleness/max"] > 0, "nothing was generated ahead"
    assert engine.most_running > 8, "the worker kept no more than a batch under way"


def test_an_error_of_the_worker_ends_the_step_and_gives_the_groups_back(tmp_path: Path) -> None:
    async def work(manager: RolloutManager) -> None:
        with pytest.raises(HookError, match="returns a Sample"):
            await manager.generate(0)
        ledger = manager._source.ledger()
        assert ledger.in_flight == 0 and ledger.buffered == ledger.issued

    hook = ("--custom-generate-function-path", f"{HOOKS}:wrong")
    asyncio.run(with_manager(rollout_args(tmp_path, *hook, "--fully-async", synchronous=False), FakeEngine(), work))


def test_a_bound_keeps_finished_groups_of_a_step_for_the_next(tmp_path: Path) -> None:
    engine = FakeEngine(tick_s=0.002)

    async def work(manager: RolloutManager) -> Any:
        versions, num_kept = [], 0
        for step in range(4):
            engine.weight_version = str(step + 1)
            engine.stops.extend([1] * 10 + [7] * 6)
            batch, metrics = await manager.generate(step)
            versions.append({int(v) for s in batch.samples for v in s.token_versions})
            assert metrics["rollout/staleness/max"] == step + 1 - min(versions[-1]) <= 1
            num_kept += step in versions[-1]
            manager.commit(step)
        return num_kept

    flags = ("--custom-rm-path", f"{HOOKS}:reward", "--over-sampling-batch-size", "8", "--max-weight-staleness", "1")
    assert asyncio.run(with_manager(rollout_args(tmp_path, *flags), engine, work)) > 0, "no surplus was kept"


@pytest.mark.parametrize(
    ("flags", "synchronous", "text"),
    [
        (["--fully-async"], True, "train_async.py"),
        (["--max-weight-staleness", "1"], False, "add --fully-async"),
        (["--max-groups-in-flight", "9"], False, "add the switch"),
        (["--fully-async", "--over-sampling-batch-size", "9"], False, "over_sampling_batch_size"),
        (["--fully-async", "--max-groups-in-flight", "3"], False, "never be full"),
        (["--max-weight-staleness", "-1"], True, "leave it out"),
        (["--pause-generation-mode", "retract"], False, "without --fully-async"),
        (["--fully-async", "--keep-old-actor"], False, "several weights"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, flags: list[str], synchronous: bool, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        rollout_args(tmp_path, *flags, synchronous=synchronous)
