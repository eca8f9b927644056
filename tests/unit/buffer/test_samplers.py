"""Laws of prompt samplers: shares hold, every row of a task comes once per epoch, a resume equals not stopping."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.samplers import Epochs, Learnability, Task, TaskSampler, TaskWalk, TaskWeights, without_ids
from slime.core.errors import CheckpointError, ConfigError, DataError
from slime.core.sample import Fingerprint, PromptRow, Sample
from slime.data.dataset import PromptDataset
from slime.rollout.manager import RolloutManager
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import rollout_args, with_manager


class TaskRows:
    """A dataset in memory whose row `i` has task `tasks[i]`."""

    def __init__(self, tasks: list[str | None]) -> None:
        self.tasks = tasks
        self.fingerprint = Fingerprint(source="memory", num_rows=len(tasks), digest=",".join(map(str, tasks)))

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, row: int) -> PromptRow:
        task = self.tasks[row]
        return PromptRow(f"p{row}", (row, 7), label=row, metadata={"task": task} if task else {}, source=f"m:{row}")


def walk_of(tasks: list[str], sampler: TaskSampler, *, shuffle: bool = True, seed: int = 3) -> TaskWalk:
    return TaskWalk(TaskRows(list(tasks)), sampler, task_key="task", shuffle=shuffle, seed=seed)


@given(
    st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(1, 5), st.floats(0.1, 10)), min_size=1),
    st.integers(1, 200),
)
def test_constant_shares_hold_at_every_prompt(tasks: dict[str, tuple[int, float]], num: int) -> None:
    """Law: each task is within one prompt per task of its exact share, however few rows it has."""
    sampler = TaskWeights(task_weights={name: weight for name, (_, weight) in tasks.items()})
    walk = walk_of([name for name, (rows, _) in tasks.items() for _ in range(rows)], sampler)
    total, seen = sum(weight for _, weight in tasks.values()), Counter[str]()
    for issued in range(1, num + 1):
        seen[walk.prompts.tasks[walk.next_row()]] += 1  # type: ignore[attr-defined]
        for name, (_, weight) in tasks.items():
            assert abs(seen[name] - issued * weight / total) < len(tasks)


def test_each_row_of_a_task_comes_once_per_epoch_of_the_task() -> None:
    tasks = ["a"] * 3 + ["b"] * 5 + ["out"]
    walk = walk_of(tasks, TaskWeights(task_weights={"a": 3, "b": 1, "out": 0}))
    rows = [walk.next_row() for _ in range(60)]
    for name, size, num in (("a", 3, 45), ("b", 5, 15)):
        own = [row for row in rows if tasks[row] == name]
        assert len(own) == num and 8 not in rows
        epochs = [own[i : i + size] for i in range(0, num, size)]
        assert all(sorted(epoch) == sorted(set(own)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1, "every epoch has its own order"
    assert walk.epoch == 60 // 9


@pytest.mark.parametrize("sampler", [TaskWeights(task_weights={"a": 1, "b": 3}), Learnability(least_task_share=0.3)])
def test_a_resumed_walk_goes_on_as_if_it_had_not_stopped(sampler: TaskSampler) -> None:
    def outcome(row: int) -> list[float]:
        return [float((row * 7 + k) % 3 == 0) for k in range(4)]

    def advance(walk: TaskWalk, num: int) -> list[int]:
        rows = []
        for _ in range(num):
            rows.append(walk.next_row())
            walk.note(rows[-1], outcome(rows[-1]))
        return rows

    tasks = list("aabbbab")
    whole, first, second = (walk_of(tasks, sampler) for _ in range(3))
    expected = advance(whole, 100)
    begun = advance(first, 37)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + advance(second, 63) == expected


def test_learnability_follows_the_variance_of_rewards() -> None:
    """Law: with rewards of 0 and 1 that are 1 with chance p, shares are those of p (1 - p), above the equal part."""
    chance = {"easy": 0.98, "hard": 0.02, "medium": 0.5}
    walk = walk_of(list(chance) * 4, Learnability(least_task_share=0.1))
    rng = np.random.default_rng(0)
    for _ in range(3000):
        row = walk.next_row()
        p = chance[walk.prompts.tasks[row]]  # type: ignore[attr-defined]
        walk.note(row, [float(one) for one in rng.random(8) < p])
    shares = Learnability(least_task_share=0.1).shares(walk.tasks)
    within = {name: p * (1 - p) * 7 / 8 for name, p in chance.items()}  # of 8 rewards about their own mean
    for name, value in within.items():
        assert shares[name] == pytest.approx(0.1 / 3 + 0.9 * value / sum(within.values()), abs=0.05)
    issued = {name: task.num_issued for name, task in walk.tasks.items()}
    assert issued["medium"] > 2000 and min(issued.values()) > 90


def test_a_task_without_rewards_counts_as_the_best_and_equal_ones_share_equally() -> None:
    tasks = {name: Task(name, np.arange(2)) for name in "abc"}
    assert Learnability().shares(tasks) == {name: pytest.approx(1 / 3) for name in "abc"}
    tasks["a"].note([0.0, 1.0])
    tasks["b"].note([1.0, 1.0])
    tasks["c"].note([])
    shares = Learnability(least_task_share=0.3).shares(tasks)
    assert shares["a"] == shares["c"] == pytest.approx(0.45) and shares["b"] == pytest.approx(0.1)


def test_a_mean_over_the_last_groups() -> None:
    task = Task("a", np.arange(2))
    for reward in (0.0, 1.0, 1.0):
        task.note([reward])
    assert task.reward == pytest.approx(2 / 3), "the plain mean at first"
    for _ in range(1000):
        task.note([5.0, 5.0])
    assert task.reward == pytest.approx(5.0) and task.variance == pytest.approx(0.0, abs=1e-6)
    assert math.isnan(Task("b", np.arange(2)).reward)


@pytest.mark.parametrize(
    ("tasks", "weights", "match"),
    [
        (["a", None], {"a": 1}, "m:1 has no task"),
        (["a", "b"], {"a": 1}, "the tasks a, b, but --task-weights names a"),
        (["a"], {"a": 1, "b": 1}, "--task-weights names a, b"),
    ],
)
def test_data_that_does_not_fit_is_refused(tasks: list[Any], weights: dict[str, float], match: str) -> None:
    with pytest.raises(DataError, match=match):
        walk_of(tasks, TaskWeights(task_weights=weights))


def test_a_state_of_another_sampler_is_refused() -> None:
    rows, weights = TaskRows(["a", "b"]), TaskWeights(task_weights={"a": 1, "b": 1})
    saved = DataBuffer(rows, sampler=weights)
    for other in (Learnability(), Epochs()):
        with pytest.raises(CheckpointError, match="--prompt-sampler task_weights"):
            DataBuffer(rows, sampler=other).load_state_dict(saved.state_dict())
    del (old := DataBuffer(rows).state_dict())["walk"]["offset"]
    with pytest.raises(CheckpointError, match="saved with epochs"):
        saved.load_state_dict(old)


def test_wrong_weights_are_refused_before_the_run(tmp_path: Path) -> None:
    flags = ("--prompt-sampler", "task_weights", "--task-weights")
    for weights in ("{}", '{"a": 0}', '{"a": -1, "b": 2}'):
        with pytest.raises(ConfigError, match="task-weights is"):
            rollout_args(tmp_path, *flags, weights)


def test_a_run_divides_prompts_and_reports_each_task(tmp_path: Path) -> None:
    """Law: groups that the dynamic filter drops count for their task too."""
    data = tmp_path / "tasks.jsonl"
    rows = [{"input": f"{i}", "label": "", "metadata": {"kind": "ab"[i % 2], "i": i}} for i in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    hooks = tmp_path / "own_hooks.py"
    hooks.write_text(
        "def reward(args, sample):\n    return float(sample.index % 2 and sample.metadata['kind'] == 'a')\n"
        "def keep(args, samples):\n    return samples[0].metadata['i'] % 4 < 2\n"
    )
    flags = ("--prompt-data", str(data), "--prompt-sampler", "learnability", "--task-key", "kind")
    flags += ("--custom-rm-path", f"{hooks}:reward", "--dynamic-sampling-filter-path", f"{hooks}:keep")
    flags += ("--least-task-share", "0.1", "--no-rollout-shuffle")
    args = rollout_args(tmp_path, *flags)

    async def work(manager: RolloutManager) -> Any:
        batches = []
        for step in range(8):
            batch, metrics = await manager.generate(step)
            batches.append((batch, metrics, manager.commit(step)))
        return batches

    batches = asyncio.run(with_manager(args, FakeEngine(), work))
    ledger = batches[-1][2]
    assert ledger["data/task/a/share"] > 0.8 and ledger["data/task/a/reward"] == pytest.approx(0.5)
    assert ledger["data/task/b/reward"] == 0.0
    named = [f"rollout/task/{task}/num_{what}_groups" for task in "ab" for what in ("kept", "dropped")]
    sums = {name: sum(one.get(name, 0) for _, one, _ in batches) for name in named}
    assert sums["rollout/task/a/num_kept_groups"] + sums["rollout/task/b/num_kept_groups"] == 32
    assert sums["rollout/task/a/num_dropped_groups"] > 0 < sums["rollout/task/b/num_dropped_groups"]
    assert ledger["data/filtered"] == sum(sums[name] for name in named if "dropped" in name)


def test_samples_of_a_user_have_no_task() -> None:
    buffer = DataBuffer(TaskRows(["a"]), sampler=Learnability())
    buffer.add_samples([[Sample(prompt="own")]])
    (group,) = buffer.get_groups(1)
    buffer.note_rewards(group.group_index, [1.0])
    assert buffer.task(group.group_index) is None and buffer.metrics()["data/task/a/num_issued"] == 0.0


def test_the_task_of_a_group_is_read_without_the_ids_of_its_prompt() -> None:
    """Law: a long prompt makes the task of a finished group no slower to read; the rest of the row is as it is."""
    rows = [PromptRow("a prompt", tuple(range(1000)), label="1", metadata={"task": "a"}, source="file:1")]
    prompts = PromptDataset(rows)
    assert without_ids(prompts, 0) == replace(rows[0], prompt_tokens=None) != prompts[0] == rows[0]
    buffer = DataBuffer(prompts)
    (group,) = buffer.get_groups(1)
    assert buffer.task(group.group_index) == "a"
    assert without_ids(TaskRows(["b"]), 0) == TaskRows(["b"])[0], "any other dataset gives its whole row"
