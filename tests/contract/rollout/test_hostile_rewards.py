"""A fifth of all rewards fails in every known way: the step finishes without them, and none becomes a zero but those of
answers that were too much for their graders.

No outcome depends on the load of the machine: graders that compute are limited in CPU time only, and the graders that
the wall clock ends are those that never end or fail anyway. What a step costs is measured by
`benchmarks.hostile_rewards`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.algorithms.advantages.grpo import group_advantages
from slime.core.batch import TrainBatch
from slime.core.sample import Sample
from slime.rewards import grader_process
from slime.rewards.pool import GraderPool
from slime.rewards.scores import Scored
from slime.rollout.manager import RolloutManager
from tests.contract.rollout import hostile_rewards
from tests.support.episode_workers import Workers, with_workers
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import rollout_args, with_manager

SAMPLES_PER_PROMPT, TOKENS = 8, 8
STALL_S = 0.5


@pytest.fixture(autouse=True)
def hostility(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(grader_process, "WALL_FACTOR", math.inf)  # a busy machine would end a grading that computes
    hostile_rewards.GIANT.append("x" * 2**30)
    yield
    hostile_rewards.GIANT.clear()
    hostile_rewards.ACTS.clear()
    hostile_rewards.GATE.clear()


async def longest_stall(stop: asyncio.Event) -> float:
    """Longest time for which the event loop answered nobody, in seconds, while this process computed most of the time.

    In other pauses, the machine gave its cores to other processes.
    """
    longest, interval_s = 0.0, 0.01
    while not stop.is_set():
        started, busy = time.monotonic(), time.process_time()
        await asyncio.sleep(interval_s)
        pause_s = time.monotonic() - started - interval_s
        if time.process_time() - busy > pause_s / 2:
            longest = max(longest, pause_s)
    return longest


async def step(manager: RolloutManager, rollout_id: int) -> tuple[TrainBatch, dict[str, float], float, float]:
    """One step: (batch, metrics, seconds, longest stall in seconds)."""
    stop = asyncio.Event()
    watch = asyncio.create_task(longest_stall(stop))
    started = time.monotonic()
    batch, metrics = await manager.generate(rollout_id)
    seconds = time.monotonic() - started
    stop.set()
    stall_s = await watch
    manager.commit(rollout_id)
    return batch, metrics, seconds, stall_s


def step_args(tmp_path: Path, num_prompts: int, *further: str) -> Any:
    """Settings of steps whose answers misbehave."""
    return rollout_args(
        tmp_path,
        "--rollout-batch-size",
        str(num_prompts),
        "--n-samples-per-prompt",
        str(SAMPLES_PER_PROMPT),
        "--rollout-max-response-len",
        str(TOKENS),
        "--sglang-server-concurrency",
        "16",
        "--rm-type",
        "exact_match",
        "--reward-num-workers",
        "2",
        "--custom-generate-function-path",
        "tests.contract.rollout.hostile_rewards:generate",
        *further,
        num_rows=2 * num_prompts,
    )


async def warm_up(graders: GraderPool) -> None:
    """Until both lanes have both of their processes, whatever their start took."""
    pair = [Sample(response="\\boxed{1}", label="1"), Sample(response="ok", custom_rm_path=hostile_rewards.REWARD)]
    for _ in range(20):
        scores = await asyncio.gather(*(graders.score(s) for s in pair * 2))
        if scores == [Scored(1.0)] * 4:
            break


def clean_and_hostile(tmp_path: Path, num_prompts: int, tick_s: float, num_workers: int = 0) -> tuple[Any, Any]:
    """A clean step, then a hostile one, of one manager with warm graders, its own or those of its workers."""
    num_executions = num_prompts * SAMPLES_PER_PROMPT
    args = step_args(tmp_path, num_prompts, "--reward-timeout-s", "4")
    engine = FakeEngine(tick_s=tick_s)

    async def steps(manager: RolloutManager, pools: list[GraderPool]) -> tuple[Any, Any]:
        for pool in pools:
            await warm_up(pool)
        clean = await step(manager, 0)
        hostile_rewards.ACTS.update(hostile_rewards.plan(num_executions, num_executions, SAMPLES_PER_PROMPT))
        return clean, await step(manager, 1)

    async def here(manager: RolloutManager) -> tuple[Any, Any]:
        return await steps(manager, [manager._graders])

    async def there(manager: RolloutManager, workers: Workers) -> tuple[Any, Any]:
        await workers.fleet.ready()
        return await steps(manager, [one.worker._graders for one in workers.started])

    run = with_workers(args, engine, num_workers, there) if num_workers else with_manager(args, engine, here)
    result: tuple[Any, Any] = asyncio.run(run)
    return result


def check_laws(clean: Any, hostile: Any, num_prompts: int, num_workers: int = 0) -> None:
    batch, metrics, _, stall_s = hostile
    acts = hostile_rewards.ACTS
    if not num_workers:  # those of a test are all on one event loop
        assert stall_s <= STALL_S, f"the event loop stalled for {stall_s:.2f} s"
    assert all(s.reward == 1 - s.index % 2 for s in clean[0].samples), "a clean reward is wrong"
    assert len(batch.samples) == num_prompts * SAMPLES_PER_PROMPT, "an unscored sample cost its group"
    assert metrics["rollout/num_failed_groups"] == metrics["rollout/num_retried_groups"] == 0, metrics
    scored = []
    for sample in batch.samples:
        act = acts.get(sample.index)
        if act is None:
            assert sample.reward == 1 - sample.index % 2, f"execution {sample.index} has the reward {sample.reward}"
        elif act in ("boxed", "giant response"):  # too much for its grader: wrong
            assert sample.reward == 0.0, sample.reward
        else:
            assert math.isnan(sample.reward), (act, sample.reward)
        if not math.isnan(sample.reward):
            scored.append(sample.reward)
    assert metrics["rollout/num_unscored_samples"] == len(batch.samples) - len(scored) == len(acts) - 2
    assert metrics["rollout/raw_reward"] == pytest.approx(np.mean(scored)), "the mean counts unscored samples"
    everyone = [(s.reward, s.group_index, s.index) for s in batch.samples]
    known = [entry for entry in everyone if not math.isnan(entry[0])]
    with_them, without = (group_advantages(*zip(*entries, strict=True)) for entries in (everyone, known))
    got = {entry[2]: value for entry, value in zip(everyone, with_them, strict=True)}
    assert [got[index] for _, _, index in known] == pytest.approx(list(without)), "they moved a group's statistics"
    assert all(got[index] == 0.0 for reward, _, index in everyone if math.isnan(reward))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_goes_on_without_its_unscored_samples(tmp_path: Path, num_workers: int) -> None:
    clean, hostile = clean_and_hostile(tmp_path, 8, 0.0, num_workers)

    check_laws(clean, hostile, 8, num_workers)


@pytest.mark.slow
def test_a_large_step_goes_on_without_its_unscored_samples(tmp_path: Path) -> None:
    clean, hostile = clean_and_hostile(tmp_path, num_prompts=32, tick_s=0.02)

    check_laws(clean, hostile, 32)


def test_generation_never_waits_for_a_reward(tmp_path: Path) -> None:
    num_prompts, engine, gate = 8, FakeEngine(), tmp_path / "gate"
    args = step_args(tmp_path, num_prompts, "--reward-timeout-s", "300")
    hostile_rewards.GATE.append(str(gate))

    async def work(manager: RolloutManager) -> TrainBatch:
        running = asyncio.create_task(manager.generate(0))
        while len(engine.requests) < num_prompts * SAMPLES_PER_PROMPT or engine.running:
            done, _ = await asyncio.wait([running], timeout=0.01)
            assert not done, "the step ended before its rewards"
        gate.touch()
        return (await running)[0]

    batch = asyncio.run(with_manager(args, engine, work))

    assert [s.reward for s in batch.samples] == [1.0] * num_prompts * SAMPLES_PER_PROMPT
