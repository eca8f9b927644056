"""A run survives its engines: one that is killed, or stopped, comes back with the current weights and serves again."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.e2e import ROOT, Flags, RealRun
from tests.support.faults import SCHEDULER, SERVER, hit, victim_of
from tests.support.ledger import require_balance

pytestmark = pytest.mark.slow

CONSTANT_LR = ["--lr", "1e-3", "--lr-decay-style", "constant"]


@pytest.mark.parametrize(
    ("script", "victim", "signum", "where"),
    [
        ("train.py", SERVER, signal.SIGKILL, []),
        ("train_async.py", SCHEDULER, signal.SIGSTOP, ["--update-weight-transport", "distributed"]),
        (
            "train.py",
            SCHEDULER,
            signal.SIGKILL,
            ["--colocate", "--actor-num-gpus-per-node", "2", "--update-weight-transport", "disk"],
        ),
    ],
)
def test_an_engine_that_is_lost_serves_again(
    runs: Path,
    digits: Callable[[Path], Flags],
    tiny_qwen3: Path,
    script: str,
    victim: str,
    signum: signal.Signals,
    where: Flags,
) -> None:
    """Law: the loss of one of two engines is noticed, costs no prompt, and ends with verified weights in its place."""
    flags = [*digits(tiny_qwen3), *CONSTANT_LR, "--rollout-num-gpus", "2", "--num-rollout", "100000", *where]
    run_dir = runs / f"lost-{script}-{victim}-{signum.name}".replace("::", "-")
    with RealRun(run_dir, flags, script=script) as run:

        def steps() -> int:
            return max(run.metrics("train"), default=-1) if (run_dir / "metrics.jsonl").exists() else -1

        run.wait_until("step 1", lambda: steps() >= 1)
        hit(victim_of(run, victim, 1), signum)
        began = time.monotonic()
        run.wait_until("word of the loss", lambda: "engine 1 was lost" in run.output)
        if signum == signal.SIGSTOP:  # named with its host and line, before it is replaced
            stopped = r"engine 1 was lost: .* on \S+ is stopped \(state T; kill -CONT \d+ continues it\)"
            assert re.search(rf"{stopped} at \S+\.py:\d+ in \w+", run.output) and time.monotonic() - began < 60, (
                run.tail
            )
        run.wait_until("engine 1 to serve again", lambda: "engine 1 serves again" in run.output)
        after = steps()
        run.wait_until("two steps more", lambda: steps() >= after + 2)
        if "distributed" in where:  # at the start, and for each loss for the one that is left and for both again
            built = run.metrics("perf")[after + 1]["perf/update_weights_groups_built"]
            assert 2 <= built <= 1 + 2 * len(re.findall(r"engine \d was lost", run.output)), run.tail
        assert run.interrupt() == 130, run.tail
        require_balance(run.metrics("train"))
        assert not any(row["data/failed"] for row in run.metrics("train").values()), "a prompt failed"
        assert run.left() == []


def test_an_engine_that_is_drained_leaves_and_comes_back_by_command(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> None:
    """Law: while an engine is drained, its process is gone and the run goes on; it costs no prompt."""
    flags = [*digits(tiny_qwen3), *CONSTANT_LR, "--rollout-num-gpus", "2", "--num-rollout", "100000"]
    run_dir = runs / "drained"

    def fleet(*words: str) -> str:
        command = [sys.executable, "-m", "slime", "fleet", str(run_dir), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with RealRun(run_dir, [*flags, "--fully-async"], script="train_async.py") as run:

        def steps() -> int:
            return max(run.metrics("train"), default=-1) if (run_dir / "metrics.jsonl").exists() else -1

        run.wait_until("step 1", lambda: steps() >= 1)
        process = victim_of(run, SERVER, 1)
        assert "engine 1 of default on 127.0.0.1: drained" in fleet("drain", "1")
        run.wait_until("the process to end", lambda: not Path(f"/proc/{process}").exists())
        after = steps()
        run.wait_until("two steps more", lambda: steps() >= after + 2)
        assert "engine 1 was lost" not in run.output
        fleet("add", "1")
        run.wait_until("engine 1 to serve again", lambda: "engine 1 serves again" in run.output)
        run.wait_until("the list to show it", lambda: "engine 1 of default on 127.0.0.1: ready" in fleet())
        assert run.interrupt() == 130, run.tail
        require_balance(run.metrics("train"))
        assert not any(row["data/failed"] for row in run.metrics("train").values()), "a prompt failed"
        assert run.left() == []
