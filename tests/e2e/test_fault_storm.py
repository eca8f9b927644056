"""Faults of every kind, one after the other, in one run: none costs a prompt, and none is trained twice."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.e2e import Flags, RealRun
from tests.support.fault_storm import KINDS, last_step, require_exact, storm, storm_flags

pytestmark = pytest.mark.slow


def test_a_run_outlives_faults_of_every_kind(runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path) -> None:
    """Law: what dies or hangs is noticed, replaced, verified and serves again; the ledger is exact in every step."""
    rollouts = runs / "storm-rollouts"
    with RealRun(runs / "storm", storm_flags(digits(tiny_qwen3), rollouts), script="train_async.py") as run:
        mended = storm(run, KINDS, seed=20)
        assert [(one.who, one.signal) for one in mended] == [(who, signum.name) for who, signum in KINDS]
        after = last_step(run)
        run.wait_until("two steps more", lambda: last_step(run) >= after + 2)
        assert run.interrupt() == 130, run.tail
        require_exact(run, rollouts)
        assert run.left() == []
    assert {one.signal for one in mended} == {signal.SIGKILL.name, signal.SIGSTOP.name}
