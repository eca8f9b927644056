"""Runs whose samples are worked on in processes of their own: they learn, and survive the death of one of those."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.e2e import PROMPTS_PER_STEP, Flags, RealRun
from tests.support.faults import WORKER, hit, victim_of
from tests.support.ledger import require_balance

pytestmark = pytest.mark.slow

FLAGS: Flags = ["--rollout-num-workers", "2", "--lr", "1e-3", "--lr-decay-style", "constant"]


@pytest.mark.parametrize(("script", "how"), [("train.py", []), ("train_async.py", ["--fully-async"])])
def test_a_worker_that_is_killed_loses_no_prompt(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path, script: str, how: Flags
) -> None:
    """Law: the death of a worker costs no prompt and no batch; another one works in its place."""
    flags = [*digits(tiny_qwen3), *FLAGS, *how, "--num-rollout", "100000"]
    with RealRun(runs / f"workers-{script}", flags, script=script) as run:

        def steps() -> int:
            return max(run.metrics("train"), default=-1) if (run.run_dir / "metrics.jsonl").exists() else -1

        run.wait_until("step 1", lambda: steps() >= 1)
        hit(victim_of(run, WORKER, 1), signal.SIGKILL)
        log = run.run_dir / "logs" / "rollout.log"
        run.wait_until("word of the death", lambda: "died, restarting it" in log.read_text())
        after = steps()
        run.wait_until("three steps more", lambda: steps() >= after + 3)
        assert run.interrupt() == 130, run.tail
        require_balance(run.metrics("train"))
        for step, row in run.metrics("train").items():
            assert row["data/trained"] == (step + 1) * PROMPTS_PER_STEP and not row["data/failed"], (step, row)
        assert run.left() == []


SLEEPS_ONCE = """
import pathlib, time
from slime.rollout.generate import generate as default

MARK = pathlib.Path(__file__).with_suffix(".slept")

async def generate(args, sample, sampling_params):
    if sample.group_index == 3 and not MARK.exists():
        MARK.touch()
        time.sleep(100_000)
    return await default(args, sample, sampling_params)
"""


def test_a_worker_that_stands_still_is_replaced_and_named(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> None:
    """Law: code that blocks the event loop of a worker for good costs that worker alone."""
    hook = runs / "sleeps_once.py"
    hook.write_text(SLEEPS_ONCE)
    how: Flags = ["--custom-generate-function-path", f"{hook}:generate", "--execution-timeout-s", "15"]
    flags = [*digits(tiny_qwen3), *FLAGS, *how, "--num-rollout", "2"]
    with RealRun(runs / "workers-blocked", flags) as run:
        assert run.wait() == 0, run.tail
        assert (
            f"{hook}:10 in generate blocked the rollout's event loop"
            in (run.run_dir / "logs" / "rollout.log").read_text()
        )
        require_balance(run.metrics("train"))
        assert [row["data/trained"] for row in run.metrics("train").values()] == [
            PROMPTS_PER_STEP,
            2 * PROMPTS_PER_STEP,
        ]
        assert run.left() == []
