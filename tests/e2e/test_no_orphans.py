"""However a run is ended, nothing of it is left. (Normal end and error: beside the runs that end so.)"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.core.processes import SHORT_ROOM, new_run_id
from tests.support import ray_job
from tests.support.e2e import Flags, RealRun, Traces

ORPHAN = """
import os, socket, sys, time
if os.fork():
    time.sleep(600)
os.setsid()
server = socket.create_server(("127.0.0.1", 0))
file = open("/dev/shm/" + sys.argv[1], "w")
print(os.getpid(), server.getsockname()[1], flush=True)
time.sleep(600)
"""
"""A driver whose child leaves its session, listens, and has a shared-memory file."""


def test_the_watcher_sees_what_is_left() -> None:
    """The laws of this folder would hold for a watcher that sees nothing: it names process, port and file."""
    name = f"slime-test-{new_run_id()}"
    with subprocess.Popen([sys.executable, "-c", ORPHAN, name], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None, "no pipe"
        traces = Traces(driver.pid)
        orphan, port = map(int, driver.stdout.readline().split())
        traces.look()
        driver.kill()
    try:
        left = traces.left()
    finally:
        os.kill(orphan, signal.SIGKILL)
        Path("/dev/shm", name).unlink()
    assert any(entry.startswith(f"process {orphan} ") for entry in left), left
    assert f"port {port}" in left and f"/dev/shm/{name}" in left, left


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path) -> None:
    """Law: Ctrl-C in the middle of a step ends the run by itself; 15 s later nothing of it is left."""
    saving: Flags = ["--save", runs / "interrupted-save", "--save-interval", "1"]
    with RealRun(runs / "interrupted", [*digits(tiny_qwen3), "--lr", "1e-2", "--num-rollout", "1000", *saving]) as run:
        run.wait_until("the second step", lambda: second_step(run))
        status = run.interrupt()
        assert status == 130 and "interrupted" in run.output, f"exit status {status}; {run.tail}"
        assert re.search(r"step_\d+ is saved; to continue with step \d+: slime train .*--load ", run.output), run.tail
        assert run.left() == []
    assert (run.run_dir / "report.md").is_file(), "the metrics so far were not reported"


def second_step(run: RealRun) -> bool:
    return (run.run_dir / "metrics.jsonl").is_file() and 1 in run.metrics("train")


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("whom", ["driver", "session", "descendants"])
def test_no_signal_leaves_anything(
    number: str, whom: str, runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> None:
    """Law: whoever gets the signal, the driver alone, its session or all that descends from it, 15 s after the driver's
    end there is no process, port, shared-memory file or temporary folder of the run."""
    flags: Flags = [*digits(tiny_qwen3), "--lr", "1e-2", "--num-rollout", "1000"]
    with RealRun(runs / f"{number}-{whom}", flags) as run:
        run.wait_until("the second step", lambda: second_step(run))
        run.signal(sent := signal.Signals[number], whom)
        assert run.wait(60) == (143 if sent is signal.SIGTERM else -sent), run.tail
        assert run.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_job_that_ray_stops_leaves_nothing(
    restarts: str, runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> None:
    """Law: `ray job stop` ends all that descends from the driver, with SIGKILL three seconds after SIGTERM; nothing of
    the run is left while the cluster lives on."""
    save = runs / f"job-{restarts}-save"
    flags: Flags = [*digits(tiny_qwen3), "--lr", "1e-2", "--num-rollout", "1000", "--max-restarts", restarts]
    flags += ["--save", save, "--load", save, "--save-interval", "1"]
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir=SHORT_ROOM) as folder,
        ray_job.cluster(Path(folder), num_cpus=4) as env,
        RealRun(runs / f"job-{restarts}", flags, script="tests/support/ray_job.py", more_env=env) as run,
    ):
        run.wait_until("the second step", lambda: second_step(run))
        run.signal(signal.SIGTERM, "driver")
        assert run.wait(60) == 0 and run.output.endswith("STOPPED\n"), run.tail
        assert run.left() == []
