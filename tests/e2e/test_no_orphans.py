"""Ctrl-C ends a run with all that belongs to it. (Normal end, error and SIGKILL: beside the runs that end so.)"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.e2e import Flags, RealRun


def test_ctrl_c_leaves_nothing(runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path) -> None:
    """Law: Ctrl-C in the middle of a step ends the run by itself; 15 s later nothing of it is left."""
    with RealRun(runs / "interrupted", [*digits(tiny_qwen3), "--lr", "1e-2", "--num-rollout", "1000"]) as run:
        run.wait_until(
            "the second step", lambda: (run.run_dir / "metrics.jsonl").is_file() and 1 in run.metrics("train")
        )
        status = run.interrupt()
        assert status == 130 and "interrupted" in run.output, f"exit status {status}; {run.tail}"
        assert run.left() == []
    assert (run.run_dir / "report.md").is_file(), "the metrics so far were not reported"
