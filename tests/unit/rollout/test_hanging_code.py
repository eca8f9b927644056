"""User code cannot hang a run: what stands still, or raises what ends processes, is a failed execution."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.buffer.data_buffer import DataBuffer
from slime.core.errors import DeadlineExceeded, HookExited
from slime.core.sample import Sample
from slime.rollout import loop
from slime.rollout.context import RolloutContext, use
from slime.rollout.guard import end_tasks, num_left_behind, supervised
from slime.rollout.manager import RolloutManager
from slime.rollout.schedules.fully_async import RolloutWorker
from slime.rollout.schedules.step import generate_step
from slime.rollout.types import Progress
from slime.rollout.user_functions import in_thread, in_time
from tests.support.async_laws import Rows
from tests.support.fake_clock import InProcessEngine, run_on_fake_clock
from tests.support.fake_engine import FakeEngine
from tests.support.marks import quick
from tests.support.rollout import rollout_args, with_manager
from tests.unit.rollout import hanging_hooks
from tests.unit.rollout.hanging_hooks import LET_GO, RAISES, TRIES, Stop

pytestmark = pytest.mark.usefixtures("graders_here")

HOOKS = "tests.unit.rollout.hanging_hooks"
REWARD = ("--custom-rm-path", f"{Path(__file__).with_name('rollout_hooks.py')}:reward")
LIMIT = ("--execution-timeout-s", "2")
SIX_HOURS_S = 6 * 3600.0


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    TRIES.clear()
    LET_GO.clear()
    yield
    LET_GO.set()
    RAISES[:] = [SystemExit]


def one_step(tmp_path: Path, *flags: str, engine: FakeEngine | None = None, is_async: bool = False) -> Any:
    """(trained groups, metrics, what the progress line says of failures) of the first step."""

    async def work(manager: RolloutManager) -> Any:
        said = list[str]()
        failed = Progress.failed

        def noted(self: Progress, reason: str) -> str:
            said.append(reason)
            return failed(self, reason)

        Progress.failed = noted  # type: ignore[method-assign]
        try:
            batch, metrics = await manager.generate(0)
        finally:
            Progress.failed = failed  # type: ignore[method-assign]
            LET_GO.set()
        manager.commit(0)
        return {s.group_index for s in batch.samples}, metrics, said

    args = rollout_args(tmp_path, *REWARD, *flags, synchronous=not is_async)
    return asyncio.run(with_manager(args, engine or FakeEngine(), work))


# ---- what stands still -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quick(["never", "never_in_thread"], "never_in_thread"))
def test_an_execution_without_progress_fails_with_the_place_where_it_stands(tmp_path: Path, name: str) -> None:
    trained, metrics, said = one_step(tmp_path, "--custom-generate-function-path", f"{HOOKS}:{name}", *LIMIT)
    assert trained == {1, 2, 3, 4} and metrics["rollout/num_quarantined_groups"] == 1
    assert len(said) == 1 and f"{HOOKS}.{name}" in said[0] and "--execution-timeout-s" in said[0]
    assert f"{hanging_hooks.__file__}:" in said[0] and f" in {name}" in said[0]


def test_an_asynchronous_run_goes_on_beside_it(tmp_path: Path) -> None:
    flags = ("--fully-async", "--custom-generate-function-path", f"{HOOKS}:never", *LIMIT)
    trained, _, _ = one_step(tmp_path, *flags, is_async=True)
    assert len(trained) == 4 and 0 not in trained, "groups are trained in the order in which they end"


def test_a_task_that_swallows_its_cancellation_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> int:
        let_go = asyncio.Event()

        async def deaf() -> None:
            while not let_go.is_set():
                try:
                    await let_go.wait()
                except asyncio.CancelledError:
                    continue

        before = num_left_behind()
        with pytest.raises(DeadlineExceeded, match=r"mine waited 100 s .* in deaf"):
            await supervised(deaf(), what="mine", limit_s=100.0)
        assert num_left_behind() == before + 1
        assert "mine did not end within 5 s of its cancellation" in caplog.text and " in deaf" in caplog.text
        task = asyncio.create_task(deaf(), name="other")
        await asyncio.sleep(0)
        await end_tasks([task], 7.0)
        assert "other did not end within 7 s" in caplog.text
        let_go.set()
        await asyncio.sleep(1)
        return num_left_behind() - before

    assert run_on_fake_clock(work()) == 0, "what has ended at last is no longer counted"


def test_the_message_shows_the_innermost_line_through_tasks() -> None:
    async def innermost() -> None:
        await asyncio.get_running_loop().create_future()

    async def outer() -> None:
        await asyncio.gather(asyncio.sleep(0), asyncio.create_task(innermost()))

    async def work() -> None:
        await supervised(outer(), what="mine", limit_s=10.0)

    with pytest.raises(DeadlineExceeded, match=rf"{Path(__file__).name}:\d+ in innermost"):
        run_on_fake_clock(work())


@pytest.mark.parametrize(
    ("flag", "name"),
    quick(
        [("--dynamic-sampling-filter-path", "stuck_filter"), ("--custom-reward-post-process-path", "stuck_converter")],
        ("--dynamic-sampling-filter-path", "stuck_filter"),
    ),
)
def test_a_synchronous_function_that_never_returns_ends_the_step_by_name(tmp_path: Path, flag: str, name: str) -> None:
    with pytest.raises(DeadlineExceeded, match=rf"{Path(hanging_hooks.__file__).name}:\d+ in {name}"):
        one_step(tmp_path, flag, f"{HOOKS}:{name}", *LIMIT)


@pytest.mark.parametrize("name", quick(["endless_step", "endless_step_in_thread"], "endless_step"))
def test_so_does_a_rollout_function_without_progress(tmp_path: Path, name: str) -> None:
    with pytest.raises(DeadlineExceeded, match=rf"{Path(hanging_hooks.__file__).name}:\d+ in {name}"):
        one_step(tmp_path, "--rollout-function-path", f"{HOOKS}:{name}", *LIMIT)


def test_progress_of_an_execution_is_progress_of_its_rollout_function(tmp_path: Path) -> None:
    flags = ("--rollout-function-path", f"{HOOKS}:patient_step", "--execution-timeout-s", "0.5")
    trained, _, said = one_step(tmp_path, *flags, engine=FakeEngine(tick_s=0.2))
    assert len(trained) == 4 and not said


def test_a_rollout_function_that_exits_ends_the_step_not_the_loop(tmp_path: Path) -> None:
    with pytest.raises(HookExited, match=r"SystemExit: 3, raised at .* in exiting_step"):
        one_step(tmp_path, "--rollout-function-path", f"{HOOKS}:exiting_step")


def test_so_does_a_data_source_that_exits(tmp_path: Path) -> None:
    with pytest.raises(HookExited, match=r"SystemExit: no more data, raised at .* in get_samples"):
        one_step(tmp_path, "--data-source-path", f"{HOOKS}:ExitingSource")


def test_functions_that_never_return_do_not_keep_the_others_waiting() -> None:
    """Law: as many as there are at once stand still, and one more returns."""

    async def work() -> str:
        async with asyncio.timeout(60):
            stuck = (in_time(0.5, LET_GO.wait) for _ in range(100))
            ended = await asyncio.gather(*stuck, return_exceptions=True)
            assert {type(one) for one in ended} == {DeadlineExceeded}
            assert num_left_behind() >= 100
            return str(await in_thread(str.upper, "done"))

    assert asyncio.run(work()) == "DONE"


def test_a_thread_that_never_returns_does_not_keep_the_process() -> None:
    script = (
        "import asyncio, threading\n"
        "from slime.core.errors import DeadlineExceeded\n"
        "from slime.rollout.user_functions import in_time\n"
        "try:\n"
        "    asyncio.run(in_time(0.2, threading.Event().wait))\n"
        "except DeadlineExceeded:\n"
        "    print('ended')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0 and ended.stdout == "ended\n", ended.stderr


def test_whoever_waits_for_a_step_of_a_loop_that_has_ended_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(loop, "LOOK_S", 0.05)
    ended = list[str]()

    async def work() -> threading.Thread:
        context = context_of(rollout_args(tmp_path), InProcessEngine(random.Random(0)))

        def call() -> None:
            try:
                with use(context):
                    loop.generate_rollout(context.args, 0, None)
            except BaseException as error:
                ended.append(repr(error))

        running = asyncio.get_running_loop()
        thread = threading.Thread(target=call, daemon=True)
        running.call_soon(thread.start)
        running.call_soon(running.stop)
        return thread

    events = asyncio.new_event_loop()
    task = events.create_task(work())
    events.run_forever()
    task.result().join(60)
    events.close()
    with warnings.catch_warnings(action="ignore"):  # the step that never began
        gc.collect()
    assert ended[0].startswith("HookError") and "stopped event loop" in ended[0]


# ---- what lasts ------------------------------------------------------------------------------------------------------


def context_of(args: Any, engine: InProcessEngine) -> RolloutContext:
    client: Any = engine
    return RolloutContext(args, client, None, None, Progress(), asyncio.get_running_loop())


@pytest.mark.parametrize("kind", quick(["sync", "async", "partial"], "async"))
def test_an_episode_of_six_hours_passes(tmp_path: Path, kind: str) -> None:
    """Law: the limit is of the time without progress, not of the time."""
    flags = {"sync": (), "async": ("--fully-async",), "partial": ("--partial-rollout",)}[kind]
    hook = (
        "--custom-generate-function-path",
        f"{HOOKS}:long_episode",
        "--rollout-sample-hook-path",
        f"{HOOKS}:rewarded",
    )
    args = rollout_args(tmp_path, *hook, *flags, synchronous=kind != "async")
    assert args.execution_timeout_s == 1800

    async def work() -> tuple[list[Sample], float]:
        buffer, engine = DataBuffer(Rows(), n_samples_per_prompt=2), InProcessEngine(random.Random(0))
        context = context_of(args, engine)
        if kind == "async":
            worker = RolloutWorker(context, buffer)
            output = await worker.step(context, 0)
            await worker.close()
        else:
            output = await generate_step(context, 0, buffer)
        return [s for group in output.samples for s in group], asyncio.get_running_loop().time()

    samples, took_s = run_on_fake_clock(work())
    assert took_s >= SIX_HOURS_S and {s.metadata["turns"] for s in samples} == {66}


def test_an_hour_of_which_nobody_hears_is_too_long(tmp_path: Path) -> None:
    hook = (
        "--custom-generate-function-path",
        f"{HOOKS}:silent_hour",
        "--rollout-sample-hook-path",
        f"{HOOKS}:rewarded",
    )
    args = rollout_args(tmp_path, *hook)

    async def work() -> Any:
        buffer, engine = DataBuffer(Rows(), n_samples_per_prompt=2), InProcessEngine(random.Random(0))
        return await generate_step(context_of(args, engine), 0, buffer)

    output = run_on_fake_clock(work())
    assert output.metrics["rollout/num_quarantined_groups"] == 1
    assert [group[0].group_index for group in output.samples] == [1, 2, 3, 4]


@pytest.mark.parametrize("schedule", quick(["", "--partial-rollout", "--fully-async"], ""))
def test_an_answer_that_takes_longer_than_the_limit_passes(tmp_path: Path, schedule: str) -> None:
    """While the engine works its own limit holds, however many tokens it samples."""
    engine = FakeEngine(tick_s=0.2)
    flags = ("--execution-timeout-s", "0.5", *schedule.split())
    trained, metrics, said = one_step(tmp_path, *flags, engine=engine, is_async="--fully-async" in flags)
    assert len(trained) == 4 and not said and metrics["rollout/num_quarantined_groups"] == 0


# ---- what ends processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error"),
    quick(
        [
            (name, error)
            for name in ("exits", "exits_in_task", "exits_in_thread")
            for error in (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, Stop)
        ],
        ("exits", SystemExit),
        ("exits_in_task", Stop),
        ("exits_in_thread", asyncio.CancelledError),
    ),
)
def test_what_ends_processes_is_a_failed_execution(
    tmp_path: Path, name: str, error: Callable[[], BaseException]
) -> None:
    RAISES[:] = [error]
    trained, metrics, said = one_step(tmp_path, "--custom-generate-function-path", f"{HOOKS}:{name}")
    assert trained == {0, 1, 2, 3} and metrics["rollout/num_retried_groups"] == 1
    assert len(said) == 1, said
    if error is not asyncio.CancelledError:
        assert error.__name__ in said[0] and f"{hanging_hooks.__file__}:" in said[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", quick([SystemExit, Stop], Stop))
def test_also_of_a_sample_hook_in_a_thread(tmp_path: Path, error: Callable[[], BaseException]) -> None:
    RAISES[:] = [error]
    trained, metrics, said = one_step(tmp_path, "--rollout-sample-hook-path", f"{HOOKS}:exiting_sample_hook")
    assert trained == {0, 1, 2, 3} and metrics["rollout/num_retried_groups"] == 1
    assert "exiting_sample_hook" in said[0]


def test_a_task_that_nobody_waits_for_does_not_end_the_loop(tmp_path: Path) -> None:
    trained, metrics, _ = one_step(tmp_path, "--custom-generate-function-path", f"{HOOKS}:exits_in_forgotten_task")
    assert trained == {0, 1, 2, 3} and metrics["rollout/num_failed_groups"] == 0


def test_our_own_cancellation_is_one() -> None:
    async def work() -> None:
        task = asyncio.create_task(supervised(asyncio.sleep(100), what="mine", limit_s=None))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        async def cancelled() -> None:
            raise asyncio.CancelledError

        with pytest.raises(HookExited, match=r"an unrequested cancellation, raised at .* in cancelled"):
            await supervised(cancelled(), what="mine", limit_s=None)

    run_on_fake_clock(work())
