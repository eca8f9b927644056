"""The alarm for silent wrongness rings: a mismatch beyond the limit ends the run, and a failed run cleans up."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.e2e import Flags, RealRun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stopped_run(runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path) -> tuple[RealRun, int]:
    """A run with a limit that no float32 engine can keep, and its exit status."""
    flags = [*digits(tiny_qwen3), "--lr", "1e-2", "--mismatch-limit", "1e-12"]
    with RealRun(runs / "limited", flags) as run:
        return run, run.wait()


def test_gap_beyond_the_limit_ends_the_run(stopped_run: tuple[RealRun, int]) -> None:
    """Law: the run ends with an error that names the worst sample, its token and both log-probs; nothing is trained."""
    run, status = stopped_run
    assert status == 1, f"exit status {status}; {run.tail}"
    assert "Traceback" not in run.output, run.tail
    message = re.search(
        r"train-inference mismatch of .*Worst token: sample (\d+) of group (\d+), response token (\d+) "
        r"\(id (\d+)\), trainer (-\d+\.\d+), engine (-\d+\.\d+)",
        run.output,
    )
    assert message is not None, run.tail
    sample, group, offset, token = (int(message[i]) for i in range(1, 5))
    assert sample // 8 == group and group < 8 and offset < 24 and token < 128, message[0]
    assert run.metrics("train") == {}, "a step beyond the limit was logged as trained"


def test_failed_run_leaves_nothing(stopped_run: tuple[RealRun, int]) -> None:
    """Law: a run that ends by an error leaves no process, port, shared-memory file or temporary folder."""
    assert stopped_run[0].left() == []
