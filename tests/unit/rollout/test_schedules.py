"""Schedules are found by name: the built-in ones, and a user's by its path; the settings that name them agree."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import ConfigError
from slime.rollout.manager import RolloutManager
from slime.rollout.schedules import SCHEDULES
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import rollout_args, with_manager

HOOKS = str(Path(__file__).with_name("rollout_hooks.py"))
OWN = "examples.own_schedule"
CONTINUOUS = '''
from slime.rollout.schedules import SCHEDULES
from slime.rollout.schedules.fully_async import FullyAsync

@SCHEDULES.register("mine")
class Mine(FullyAsync):
    """Generates all the time."""
'''


def test_each_built_in_schedule_has_a_name() -> None:
    assert {"step", "fully_async", "function"} <= set(SCHEDULES.names())
    assert [name for name, entry in SCHEDULES if entry.continuous and entry.__module__.startswith("slime.")] == [
        "fully_async"
    ]


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ((), "step"),
        (("--rollout-schedule", "step"), "step"),
        (("--rollout-function-path", "slime.rollout.loop:generate_rollout"), "step"),
        (("--rollout-function-path", f"{HOOKS}:own_rollout"), "function"),
        (("--rollout-function-path", "slime.rollout.sft.generate_rollout"), "function"),
        (("--fully-async",), "fully_async"),
        (("--rollout-schedule", "fully_async"), "fully_async"),
        (("--rollout-function-path", "slime.rollout.fully_async.generate_rollout_fully_async"), "fully_async"),
    ],
)
def test_the_settings_say_the_schedule(tmp_path: Path, flags: tuple[str, ...], name: str) -> None:
    continuous = name == "fully_async"
    args = rollout_args(tmp_path, *flags, synchronous=not continuous)
    assert args.rollout_schedule == name and args.fully_async == continuous


def test_a_schedule_of_the_user_that_generates_all_the_time_is_fully_async(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CONTINUOUS)
    args = rollout_args(tmp_path, "--rollout-schedule", str(file), synchronous=False)
    assert args.fully_async and args.max_groups_in_flight == 8
    with pytest.raises(ConfigError, match=r"train_async\.py"):
        rollout_args(tmp_path, "--rollout-schedule", str(file))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--rollout-schedule", "stop"), "did you mean step"),
        (("--rollout-schedule", "step", "--fully-async"), "rop one of the two"),
        (("--rollout-schedule", "fully_async", "--no-fully-async"), "rop one of the two"),
        (("--rollout-schedule", "step", "--rollout-function-path", f"{HOOKS}:own_rollout"), "rop one of the two"),
        (("--rollout-schedule", "examples.small_hooks:rollout"), "it must be a subclass of"),
        (("--rollout-schedule", f"{HOOKS}:NoSchedule"), "does not define step"),
        (("--rm-type", f"{HOOKS}:NoGrader"), "does not define grade"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, flags: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        rollout_args(tmp_path, *flags, synchronous=False)


def test_a_schedule_of_the_user_runs_and_the_ledger_balances(tmp_path: Path) -> None:
    engine = FakeEngine(tick_s=0.001)

    async def work(manager: RolloutManager) -> Any:
        seen: list[int] = []
        for step in range(3):
            engine.weight_version = str(step + 1)
            engine.stops.extend([1] * 6 + [7] * 6)
            batch, metrics = await manager.generate(step)
            seen += sorted({s.group_index for s in batch.samples})
            ledger = manager.commit(step)
            assert ledger["data/in_flight"] == 0 and metrics["rollout/num_aborted_groups"] == 0
        return seen, ledger

    flags = ("--custom-rm-path", f"{HOOKS}:reward", "--over-sampling-batch-size", "6", "--max-weight-staleness", "1")
    args = rollout_args(tmp_path, "--rollout-schedule", OWN, *flags)
    seen, ledger = asyncio.run(with_manager(args, engine, work))
    assert len(seen) == len(set(seen)) == 12, "a group was trained twice"
    assert ledger["data/returned/surplus"] > 0 and ledger["data/trained"] == 12
