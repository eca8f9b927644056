"""The guardian of a host without the driver: it outlives its owner, it is replaced, it empties the host."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.cluster.host_guardian import HostGuardian
from slime.core.ids import RUN_ID_ENV
from slime.serving.proctree import has_mark, read_stat

LIMIT_S = 30.0
SLEEPER = [sys.executable, "-c", "import time; time.sleep(300)"]
OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from slime.cluster.host_guardian import HostGuardian
guardian = HostGuardian(sys.argv[1], log_path=Path(sys.argv[2]))
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
print("up", flush=True)
time.sleep(300)
"""


def guardians(run_id: str) -> list[int]:
    """Pids of the guardians of a run."""
    found = []
    for pid in (int(p) for p in os.listdir("/proc") if p.isdigit()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        stat = read_stat(pid)
        if b"slime.cluster.guardian" in words and run_id.encode() in words and stat is not None and stat.state != "Z":
            found.append(pid)
    return found


def until(what: str, condition: Callable[[], bool]) -> None:
    """Returns when `condition` holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not {what} after {LIMIT_S:.0f} s"
        time.sleep(0.1)


def members(run_id: str) -> list[int]:
    mark = f"{RUN_ID_ENV}={run_id}".encode()
    return [int(p) for p in os.listdir("/proc") if p.isdigit() and has_mark(int(p), mark)]


def test_a_guardian_that_is_killed_is_replaced_and_the_last_one_empties_the_host(tmp_path: Path) -> None:
    run_id = secrets.token_hex(6)
    guardian = HostGuardian(run_id, log_path=tmp_path / "guardian.log")
    child = subprocess.Popen(SLEEPER, env={**os.environ, RUN_ID_ENV: run_id})
    try:
        (first,) = guardians(run_id)
        stat = read_stat(first)
        assert stat is not None and stat.parent != os.getpid(), "Ray ends the children of an actor with it"
        os.kill(first, signal.SIGKILL)
        until("another guardian", lambda: guardians(run_id) not in ([], [first]))
        guardian.close()
        assert child.wait(1) == -signal.SIGTERM
        until("without guardian", lambda: guardians(run_id) == [])
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_the_end_of_the_owner_is_the_end_of_the_run_on_its_host(tmp_path: Path) -> None:
    run_id = secrets.token_hex(6)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, run_id, str(tmp_path / "guardian.log")],
        env={**os.environ, RUN_ID_ENV: run_id},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "up\n", "no owner"
        assert len(members(run_id)) == 2 and guardians(run_id), "an owner, what it started, and its guardian"
        owner.kill()
        owner.wait()
        until("an empty host", lambda: not members(run_id) and not guardians(run_id))
    finally:
        owner.kill()
        owner.wait()
