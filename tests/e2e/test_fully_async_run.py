"""A whole run of `train_async.py` that never waits for its slowest sample, on the real engines: it learns, keeps its
bound, accounts for every prompt, and evaluates one version of the weights at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from recipes.tiny.tasks import DIGITS_FILE
from slime.observability.sinks import read_jsonl
from tests.support.e2e import (
    NUM_STEPS,
    PROMPTS_PER_STEP,
    SAMPLES_PER_PROMPT,
    Flags,
    RealRun,
    recorded_groups,
    started_and_finished,
)
from tests.support.ledger import require_balance

pytestmark = pytest.mark.slow
BOUND, EVAL_EVERY = 2, 5
MIN_RISE = 0.08
"""The mean reward of 192 samples has a standard error below 0.01; old tokens make learning slower than in step."""
PUBLIC_NAME = "slime.rollout.fully_async.generate_rollout_fully_async"


@pytest.fixture(scope="module")
def rollouts(runs: Path) -> str:
    """Template of the recorded rollouts."""
    return str(runs / "fully-async-rollouts" / "{rollout_id}.jsonl.zst")


@pytest.fixture(scope="module")
def run(runs: Path, tasks: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path, rollouts: str) -> RealRun:
    """Chosen by the public name; the bound is 2."""
    how: Flags = [
        "--rollout-function-path",
        PUBLIC_NAME,
        "--max-weight-staleness",
        str(BOUND),
        "--lr",
        "1e-2",
        "--lr-decay-style",
        "constant",
        "--save-debug-rollout-data",
        rollouts,
    ]
    held: Flags = ["--eval-prompt-data", "held", f"{tasks / DIGITS_FILE}@[0:8]", "--eval-interval", str(EVAL_EVERY)]
    return started_and_finished(runs / "fully-async", [*digits(tiny_qwen3), *how, *held], script="train_async.py")


def test_reward_rises(run: RealRun) -> None:
    rewards = run.series("rollout", "rollout/raw_reward")
    assert len(rewards) == NUM_STEPS and fmean(rewards[-3:]) > fmean(rewards[:3]) + MIN_RISE, rewards


def test_batches_are_full_and_no_group_is_trained_twice(run: RealRun, rollouts: str) -> None:
    seen: set[Any] = set()
    for step in range(NUM_STEPS):
        groups = recorded_groups(rollouts, step)
        indices = {s.group_index for group in groups for s in group}
        assert [len(group) for group in groups] == [SAMPLES_PER_PROMPT] * PROMPTS_PER_STEP, step
        assert len(indices) == PROMPTS_PER_STEP and not indices & seen, step
        seen |= indices


def test_no_token_is_older_than_the_bound(run: RealRun) -> None:
    ages = run.series("rollout", "rollout/staleness/max")
    assert len(ages) == NUM_STEPS and 0 < max(ages) <= BOUND, ages
    for step, row in run.metrics("rollout").items():
        assert step + 1 - BOUND <= row["rollout/weight_version/min"] <= row["rollout/weight_version/max"] <= step + 1


def test_the_ledger_balances(run: RealRun) -> None:
    require_balance(run.metrics("train"))
    for step, row in run.metrics("train").items():
        assert row["data/trained"] == (step + 1) * PROMPTS_PER_STEP, (step, row)


def test_every_weight_sync_is_verified_and_the_worker_hardly_rests(run: RealRun) -> None:
    rows = run.metrics("perf")
    assert sorted(rows) == list(range(NUM_STEPS))
    assert all(row["perf/update_weights_verify_time"] > 0 for row in rows.values())
    rests = run.series("rollout", "perf/rollout_idle_time")
    assert len(rests) == NUM_STEPS and all(0 <= s < run.seconds for s in rests), rests


def test_evaluations_come_when_due_and_are_of_one_version(run: RealRun) -> None:
    rows = [row for row in read_jsonl(run.run_dir / "metrics.jsonl") if "eval/weight_version" in row]
    due = [-1, *(step for step in range(NUM_STEPS) if (step + 1) % EVAL_EVERY == 0 or step + 1 == NUM_STEPS)]
    assert [row["eval/weight_version"] for row in rows] == [step + 2 for step in due], rows
    assert rows[-1]["eval/held"] > rows[0]["eval/held"], rows


def test_nothing_is_left(run: RealRun) -> None:
    assert run.left() == []
