"""The worker of `--fully-async`, under random schedules on a fake clock and an engine that keeps the protocol.

Whatever ends when: the ledger balances, nothing is trained twice, no trained token is older than the bound, each token
has the version that sampled it, and a resume continues with every prompt that was not trained.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.buffer.data_buffer import DataBuffer
from slime.core.errors import ConfigError, DeadlineExceeded, EngineError, HookError, LedgerError
from slime.core.sample import NOT_SAMPLED, Group, Sample
from slime.rollout.manager import RolloutManager
from slime.rollout.sample_metrics import staleness
from slime.rollout.schedules.fully_async import BoundedPolicy
from slime.rollout.schedules.group_loop import GroupLoop, Policy
from slime.rollout.user_functions import RolloutHooks
from tests.support.async_laws import Schedule
from tests.support.fake_clock import InProcessEngine, run_on_fake_clock
from tests.support.fake_engine import FakeEngine
from tests.support.marks import quick
from tests.support.rollout import rollout_args, with_manager

pytestmark = pytest.mark.usefixtures("graders_here")

HOOKS = str(Path(__file__).with_name("rollout_hooks.py"))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("fully-async")
    return rollout_args(path, "--fully-async", "--rm-type", "random", synchronous=False)


def run_schedules(settings: Any, seeds: range, num_workers: int) -> None:
    num_killed = 0
    logging.disable(logging.WARNING)
    try:
        for seed in seeds:
            try:
                schedule = Schedule(settings, seed, num_steps=5, faults=True, num_workers=num_workers)
                pause_mode = schedule.rng.choice(["abort", "in_place"])
                engine = InProcessEngine(schedule.rng, schedule.fault_rate, pause_mode=pause_mode)
                run_on_fake_clock(schedule.run(engine))
                num_killed += schedule.num_killed
            except EngineError as error:
                assert "groups failed in step" in str(error), f"seed {seed}"
            except BaseException as error:
                error.add_note(f"schedule {seed}")
                raise
    finally:
        logging.disable(logging.NOTSET)
    assert not num_workers or num_killed > len(seeds) // 20, f"{num_killed} workers were killed"


@pytest.mark.parametrize("num_workers", quick([0, 2], 2))
def test_the_laws_hold_under_random_schedules(settings: Any, num_workers: int) -> None:
    run_schedules(settings, range(8), num_workers)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_the_laws_hold_under_many_random_schedules(settings: Any, num_workers: int) -> None:
    run_schedules(settings, range(8, 4000), num_workers)


def test_steps_through_the_manager_train_what_is_finished_and_count_how_old_it_is(tmp_path: Path) -> None:
    engine = FakeEngine(tick_s=0.001, stop_after=4)

    async def work(manager: RolloutManager) -> Any:
        seen, metrics = [], []
        for step in range(3):
            batch, figures = await manager.generate(step)
            metrics.append(figures)
            seen += sorted({s.group_index for s in batch.samples})
            manager.commit(step)
            await manager.save(tmp_path)
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
        with pytest.raises(HookError, match="must return a Sample"):
            await manager.generate(0)
        ledger = manager._source.ledger()
        assert ledger.in_flight == 0 and ledger.buffered == ledger.issued

    hook = ("--custom-generate-function-path", f"{HOOKS}:wrong")
    asyncio.run(with_manager(rollout_args(tmp_path, *hook, "--fully-async", synchronous=False), FakeEngine(), work))


def test_a_group_whose_tries_outlast_steps_is_given_up(tmp_path: Path) -> None:
    """Law: a group fails for good after as many tries in all; it does not hold its place for ever."""
    engine = FakeEngine()

    async def work(manager: RolloutManager) -> None:
        for step in range(40):
            batch, _ = await manager.generate(step)
            assert 0 not in {s.group_index for s in batch.samples}
            if manager.commit(step)["data/failed"]:
                return
            engine.weight_version = str(step + 2)
            await asyncio.sleep(0.1)
        raise AssertionError("it was tried for ever")

    hooks = ("--custom-rm-path", f"{HOOKS}:reward", "--custom-generate-function-path", f"{HOOKS}:slow_failure")
    args = rollout_args(tmp_path, *hooks, "--fully-async", num_rows=200, synchronous=False)
    asyncio.run(with_manager(args, engine, work))


@pytest.mark.timeout(60)
def test_a_step_that_waits_too_long_says_so(tmp_path: Path) -> None:
    async def work(manager: RolloutManager) -> None:
        with pytest.raises(DeadlineExceeded, match="rollout of step 0 waited"):
            await manager.generate(0)

    flags = ("--fully-async", "--rollout-global-timeout-s", "0.3")
    engine = FakeEngine(faults=deque(["hang"] * 64))
    asyncio.run(with_manager(rollout_args(tmp_path, *flags, synchronous=False), engine, work))


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


PUBLIC_NAME = "slime.rollout.fully_async:generate_rollout_fully_async"


@pytest.mark.parametrize("name", [PUBLIC_NAME, PUBLIC_NAME.replace(":", ".")])
def test_the_public_name_means_the_switch(tmp_path: Path, name: str) -> None:
    flags = ("--max-weight-staleness", "1")
    by_name = rollout_args(tmp_path, "--rollout-function-path", name, *flags, synchronous=False)
    by_switch = rollout_args(tmp_path, "--fully-async", *flags, synchronous=False)
    assert by_name.fully_async and by_name.replace(run_id="") == by_switch.replace(run_id="")
    both = rollout_args(tmp_path, "--rollout-function-path", name, "--fully-async", *flags, synchronous=False)
    assert both.replace(run_id="") == by_switch.replace(run_id="")
    with pytest.raises(ConfigError, match="no-fully-async"):
        rollout_args(tmp_path, "--rollout-function-path", name, "--no-fully-async", synchronous=False)


def test_the_public_name_is_a_function_that_says_what_it_stands_for() -> None:
    from slime.public.generation import generate_rollout_fully_async

    with pytest.raises(HookError, match="use --fully-async"):
        generate_rollout_fully_async(None, 3, None)


@pytest.mark.parametrize(
    ("flags", "synchronous", "text"),
    [
        (["--fully-async"], True, "train_async.py"),
        (["--rollout-function-path", PUBLIC_NAME], True, "train_async.py"),
        (["--rollout-function-path", "examples.small_hooks:rollout", "--fully-async"], False, "rollout_function_path"),
        (["--max-weight-staleness", "1"], False, "add --fully-async"),
        (["--max-groups-in-flight", "9", "--strict"], False, "the worker of --fully-async"),
        (["--fully-async", "--over-sampling-batch-size", "9", "--strict"], False, "over_sampling_batch_size"),
        (["--fully-async", "--max-groups-in-flight", "3"], False, "no batch would ever be full"),
        (["--fully-async", "--update-weights-interval", "4"], False, "wait forever"),
        (["--max-weight-staleness", "-1"], True, "leave it out"),
        (["--fully-async", "--keep-old-actor"], False, "several weight versions"),
        (["--pause-generation-mode", "retract", "--strict"], False, "which needs --fully-async"),
        (
            ["--fully-async", "--pause-generation-mode", "in_place", "--sglang-chunked-prefill-size", "512"],
            False,
            "several weight versions could prefill one prompt",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, flags: list[str], synchronous: bool, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        rollout_args(tmp_path, *flags, synchronous=synchronous)


def test_an_interruption_is_meant_twice_in_a_step(settings: Any) -> None:
    """Law: the third one of a group counts as a failure; the next step counts anew."""
    context: Any = SimpleNamespace(args=settings)
    policy = BoundedPolicy(context, DataBuffer(None))
    groups = [Group(index, (Sample(group_index=index),)) for index in (0, 0, 1, 0, 1)]
    loop: Any = None
    assert [policy.was_meant(loop, group) for group in groups] == [True, True, True, False, True]
    policy.interrupted.clear()
    assert policy.was_meant(loop, groups[0])


def test_a_batch_is_as_old_as_its_oldest_token_and_beyond_the_bound_it_is_refused() -> None:
    """Law: whichever token of whichever sample that is; what no engine sampled has no age."""
    columns = [[4, 4], [4, 2], [NOT_SAMPLED, 3], [NOT_SAMPLED]]
    batch = [[Sample(token_versions=list(v), response_length=len(v), started_version=1 + len(v))] for v in columns]
    found = staleness(batch, now=5, limit=3)
    start = found.pop("rollout/staleness/since_start/max")
    assert found == {"rollout/staleness/mean": 1.6, "rollout/staleness/max": 3.0} and start == 3.0
    for order in (batch, batch[::-1]):
        with pytest.raises(LedgerError, match="a token that is 3 versions older"):
            staleness(order, now=5, limit=2)


class Rests(Policy):
    """Starts nothing."""

    def num_missing(self, loop: GroupLoop) -> int:
        return 0

    def was_meant(self, loop: GroupLoop, group: Group) -> bool:
        return False

    def accept(self, loop: GroupLoop, group: Group) -> None:
        raise AssertionError("nothing runs")


@pytest.mark.parametrize("ticks", range(6))
def test_a_worker_that_is_woken_and_cancelled_at_once_ends(settings: Any, ticks: int) -> None:
    """`asyncio.wait_for` of Python 3.11 returns instead, and whoever closes the worker waits for ever."""

    async def main() -> None:
        loop = GroupLoop(
            SimpleNamespace(args=settings, client=None, workers=None), RolloutHooks.load(settings), None, Rests()
        )

        async def work() -> None:
            while True:
                await loop.turn(60.0)

        worker = asyncio.create_task(work())
        await asyncio.sleep(0.01)
        loop.wake()
        for _ in range(ticks):
            await asyncio.sleep(0)
        worker.cancel()
        ended, _ = await asyncio.wait([worker], timeout=5)
        assert ended, "the cancellation was lost"

    asyncio.run(main())
