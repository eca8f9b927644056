"""The guardian of a run: whatever ends the driver, nothing of the run is left, and nobody else is touched."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slime.cluster.guardian import LOOK_AT_LEAST_EVERY_S, start_guardian
from slime.core.processes import RUN_ID_ENV
from slime.serving.child_process import has_mark, read_stat

LIMIT_S = 15.0
"""What the project promises."""
START_LIMIT_S = 60.0
"""For the processes of a driver to come up, on a busy machine."""

DRIVER = """
import multiprocessing, os, subprocess, sys, time
from slime.cluster.guardian import start_guardian
from slime.core.processes import RUN_ID_ENV

run_id, temp_dir, ending = sys.argv[1:4]
os.environ[RUN_ID_ENV] = run_id
guardian = start_guardian(run_id, temp_dirs=[temp_dir])
sleep = "import time; time.sleep(300)"
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
detach = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', %r], start_new_session=True)" % stubborn
torch_like = "import mmap, os, time; n = '/dev/shm/torch_%d_7_0' % os.getpid(); f = open(n, 'wb+');" \\
    "f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); f.close(); time.sleep(300)"
psm_like = "from multiprocessing.shared_memory import SharedMemory as S; import time, sys;" \\
    "m = S('psm_' + sys.argv[1], True, 4096); time.sleep(300)"
for code in (sleep, stubborn, detach, torch_like, psm_like):
    subprocess.Popen([sys.executable, "-c", code, run_id], env={**os.environ, "TMPDIR": os.path.dirname(temp_dir)})
if os.fork() == 0:  # holds the guardian's pipe open, and carries no mark
    time.sleep(3)
    os._exit(0)
time.sleep(1.5)
print("up", guardian.pid, flush=True)
if ending == "wait":
    time.sleep(300)
elif ending == "close":
    guardian.close()
    print("closed", flush=True)
elif ending == "raise":
    raise RuntimeError("the driver fails")
"""


def is_alive(pid: int) -> bool:
    return (stat := read_stat(pid)) is not None and stat.state not in "ZX"


def members(run_id: str) -> list[int]:
    mark = f"{RUN_ID_ENV}={run_id}".encode()
    return [int(p) for p in os.listdir("/proc") if p.isdigit() and has_mark(int(p), mark)]


def shm_of(run_id: str, pids: list[int]) -> list[str]:
    names = os.listdir("/dev/shm")
    return [n for n in names if n == f"psm_{run_id}" or any(n.startswith(f"torch_{p}_") for p in pids)]


SLOW_ENDINGS = [
    pytest.param(ending, marks=pytest.mark.slow) for ending in ("SIGINT", "SIGTERM", "return", "close", "raise")
]
JOB_STOP = "ray job stop"


def stop_as_a_job(driver: int) -> None:
    """What Ray's supervisor of jobs does: SIGTERM to all that descends from the driver, then SIGKILL to the same."""
    found = [process.pid for process in psutil.Process(driver).children(recursive=True)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in (driver, *found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.5)


@pytest.mark.parametrize("ending", ["SIGKILL", pytest.param(JOB_STOP, marks=pytest.mark.slow), *SLOW_ENDINGS])
def test_nothing_of_a_run_is_left_15_s_after_its_driver(ending: str, tmp_path: Path) -> None:
    """Law: that includes temporary folders with the run's name, also where the driver itself would make none."""
    run_id = secrets.token_hex(6)
    temp_dir, made = tmp_path / "ray", tmp_path / f"slime-{run_id}-code-x"
    temp_dir.mkdir()
    made.mkdir()
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    by_signal = getattr(signal, ending, None) if ending.startswith("SIG") else None
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, run_id, str(temp_dir), "wait" if by_signal or ending == JOB_STOP else ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert driver.stdout is not None
        word, guardian_pid = driver.stdout.readline().split()
        assert word == "up"
        if by_signal or ending == JOB_STOP:
            up_by = time.monotonic() + START_LIMIT_S
            while len(started := members(run_id)) < 5 or len(shm_of(run_id, started)) < 2:
                assert time.monotonic() < up_by, f"{len(started)} members and {shm_of(run_id, started)} came up"
                time.sleep(0.1)
            time.sleep(1.5 * LOOK_AT_LEAST_EVERY_S)  # what lives shorter than that the guardian may never have seen
            if by_signal:
                os.killpg(driver.pid, by_signal)
            else:
                stop_as_a_job(driver.pid)
        else:
            started = []
        began = time.monotonic()
        while (members(run_id) or is_alive(int(guardian_pid)) or temp_dir.exists()) and (
            time.monotonic() - began < LIMIT_S
        ):
            time.sleep(0.1)
        assert members(run_id) == []
        assert shm_of(run_id, started) == []
        assert not temp_dir.exists() and not made.exists()
        assert stranger.poll() is None
    finally:
        driver.kill()
        driver.wait()
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("looked", [True, False])
def test_a_guardian_that_is_killed_is_replaced(looked: bool) -> None:
    """Law: when the driver looks, and at the end if it did not: what is left is ended, and nobody says that it is."""
    run_id = secrets.token_hex(6)
    guardian = start_guardian(run_id)
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(300)"], env={**os.environ, RUN_ID_ENV: run_id}
    )
    try:
        first = guardian.pid
        guardian.tend()
        assert guardian.pid == first, "it lives"
        os.kill(first, signal.SIGKILL)
        while is_alive(first) and guardian.alive:
            time.sleep(0.01)
        if looked:
            guardian.tend()
            assert guardian.alive and guardian.pid != first
        guardian.close()
        assert child.wait(1) == -signal.SIGTERM
        assert not guardian.alive
    finally:
        child.kill()
        child.wait()


def test_close_returns_when_all_are_gone_and_may_be_called_again() -> None:
    run_id = secrets.token_hex(6)
    guardian = start_guardian(run_id)
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(300)"], env={**os.environ, RUN_ID_ENV: run_id}
    )
    assert guardian.alive
    guardian.close()
    assert child.wait(1) == -signal.SIGTERM
    guardian.close()
