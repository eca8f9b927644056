"""A run that loses a training rank goes on by itself (`--max-restarts`), as one that somebody resumes by hand."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.core.processes import RUN_ID_ENV
from slime.serving.child_process import all_processes, has_mark
from tests.support.e2e import NUM_STEPS, Flags, RealRun, latest_step, recorded_groups
from tests.support.hosted_run import HostedRun
from tests.support.ledger import require_balance

pytestmark = pytest.mark.slow
KILL_AFTER = 1
"""Last step of the checkpoint after which a rank is killed."""


def training_ranks(run_id: str) -> dict[int, int]:
    """Rank -> pid of the training ranks of a start. A rank has its log open, which is named after it."""
    mark, found = f"{RUN_ID_ENV}={run_id}".encode(), {}
    for pid, process in all_processes().items():
        if process.name.startswith("ray::TrainActor") and has_mark(pid, mark):
            opened = {Path(os.readlink(link)) for link in Path(f"/proc/{pid}/fd").iterdir()}
            (log,) = (file for file in opened if file.name.startswith("train_"))
            found[int(log.stem.removeprefix("train_"))] = pid
    return found


def starts_of(run: RealRun | HostedRun) -> list[dict[str, object]]:
    return list(json.loads((run.run_dir / "run.json").read_text())["starts"])


def test_a_killed_rank_costs_no_more_than_the_steps_since_the_checkpoint(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> None:
    """Law: the curve goes on in the same folder, the ledger balances, no prompt is trained twice, nothing is left."""
    save, rollouts = runs / "restarted-save", str(runs / "restarted-rollouts" / "{rollout_id}.jsonl.zst")
    flags: Flags = [*digits(tiny_qwen3), "--lr", "2e-2", "--lr-decay-style", "linear", "--min-lr", "1e-2"]
    flags += ["--actor-num-gpus-per-node", "2", "--save", save, "--load", save, "--save-interval", "1"]
    flags += ["--save-debug-rollout-data", rollouts, "--max-restarts", "2"]
    with RealRun(runs / "restarted", flags) as run:
        run.wait_until("a checkpoint", lambda: latest_step(save) >= KILL_AFTER)
        ranks = training_ranks(str(starts_of(run)[0]["run_id"]))
        assert len(ranks) == 2, ranks
        os.kill(ranks[1], signal.SIGKILL)
        assert run.wait() == 0, run.tail
        assert run.left() == []
    first, second = starts_of(run)
    restart = second["restart"]
    assert "restart" not in first and isinstance(restart, dict)
    assert restart["number"] == 1 and restart["step"] > KILL_AFTER and "training rank 1 on " in restart["because"]
    assert f"restart 1 of 2: continues with step {restart['step']}, from step_" in run.output, run.tail
    assert sorted(run.metrics("train")) == list(range(NUM_STEPS)), "each step, in one record"
    require_balance(run.metrics("train"))
    versions, rates = run.series("rollout", "rollout/weight_version/min"), run.series("train", "train/lr-pg_0")
    assert versions == [versions[0] + step for step in range(NUM_STEPS)], "each step has its own weights, in order"
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == NUM_STEPS, rates
    groups = [group[0].group_index for step in range(NUM_STEPS) for group in recorded_groups(rollouts, step)]
    assert len(groups) == len(set(groups)), "a group was trained twice"
    report = (run.run_dir / "report.html").read_text()
    assert "resumed automatically after" in report and "2 starts" in report
