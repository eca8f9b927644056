"""A generate function that sleeps on the event loop for good ends the run with its name, not by standing still."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.e2e import Flags, RealRun

pytestmark = pytest.mark.slow

SLEEPS = """
import time

async def generate(args, sample, sampling_params):
    time.sleep(100_000)
"""


@pytest.fixture(scope="module")
def blocked_run(runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path) -> tuple[RealRun, int, Path]:
    """A run of such a function, its exit status, and the file of the function."""
    hook = runs / "sleeps.py"
    hook.write_text(SLEEPS)
    flags = [*digits(tiny_qwen3), "--lr", "1e-2", "--custom-generate-function-path", f"{hook}:generate"]
    with RealRun(runs / "blocked", [*flags, "--execution-timeout-s", "15"]) as run:
        return run, run.wait(), hook


def test_the_run_ends_with_the_name_of_what_blocked_it(blocked_run: tuple[RealRun, int, Path]) -> None:
    run, status, hook = blocked_run
    assert status == 1, f"exit status {status}; {run.tail}"
    assert f"{hook}:5 in generate blocked the rollout's event loop" in run.output and "Traceback" not in run.output, (
        run.tail
    )
    warned = (run.run_dir / "logs" / "rollout.log").read_text()
    assert f"{hook}:5 in generate has blocked the event loop" in warned, "the log named it while it stood still"


def test_it_leaves_nothing(blocked_run: tuple[RealRun, int, Path]) -> None:
    assert blocked_run[0].left() == []
