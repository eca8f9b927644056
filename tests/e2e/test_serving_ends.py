"""A served model outlives its router, and ends without fault tolerance when an engine does: at once, with a sentence,
an exit status and a log to read."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from slime.serving.child_process import read_stat
from slime.serving.leased_ports import lease_ports
from tests.support.e2e import Flags, RealRun

pytestmark = pytest.mark.slow


def pid_of(run: RealRun, name: str) -> int:
    """The run's process whose name begins so."""
    run.traces.look()
    stats = [read_stat(member.pid) for member in run.traces.members]
    found = [stat.id.pid for stat in stats if stat is not None and stat.name.startswith(name)]
    assert len(found) == 1, f"{len(found)} processes {name}"
    return found[0]


def test_an_engine_or_a_router_that_ends(runs: Path, tiny_qwen3: Path) -> None:
    """Law: serving watches both; a router comes back, and an engine that may not ends the command, with its log."""
    with lease_ports() as free:
        port = free.port
    flags: Flags = ["--debug-rollout-only", "--num-rollout", "0", "--no-bf16", "--hf-checkpoint", tiny_qwen3]
    flags += ["--no-use-fault-tolerance"]
    with RealRun(runs / "served", [*flags, "--router-port", str(port)]) as run:
        run.wait_until("word of its address", lambda: f"serving at http://127.0.0.1:{port} " in run.output)
        log = run.run_dir / "logs" / "rollout.log"
        os.kill(pid_of(run, "sglang::router"), signal.SIGKILL)
        run.wait_until("the router", lambda: f"at http://127.0.0.1:{port} answers again" in log.read_text(), 240)
        run.require_closed()
        os.kill(pid_of(run, "sglang::schedul"), signal.SIGKILL)
        status = run.wait(240)
        assert status not in (0, 130), f"exit status {status}; {run.tail}"
        assert re.search(r"engine 0 was lost.*engine_0\.log", run.output), run.tail
        assert run.left() == []
