"""The guardian of a host without the driver: it outlives its owner, it is replaced, it empties the host."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.cluster.guardian import MAX_STARTS, HostGuardian, ending_guardians
from slime.core.errors import EngineError
from slime.core.processes import RUN_ID_ENV
from slime.serving.child_process import has_mark, read_stat

LIMIT_S = 30.0
SLEEPER = [sys.executable, "-c", "import time; time.sleep(300)"]
OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from slime.cluster.guardian import HostGuardian
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


def test_who_asks_hears_when_no_guardian_follows(tmp_path: Path) -> None:
    """Law: `wait` returns when the last guardian is killed, not before; the end without one is told as such."""
    run_id = secrets.token_hex(6)
    guardian = HostGuardian(run_id, log_path=tmp_path / "guardian.log")
    over = threading.Event()

    def wait() -> None:
        guardian.wait()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    killed: set[int] = set()
    while len(killed) < MAX_STARTS:
        until("a guardian", lambda: bool(set(guardians(run_id)) - killed))
        with guardian._lock:  # the one that is seen watches when its start is over
            assert not over.is_set(), f"{len(killed)} were killed"
        (pid,) = set(guardians(run_id)) - killed
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    assert over.wait(LIMIT_S)
    with pytest.raises(EngineError, match=r"the guardian on .* was killed or crashed"):
        guardian.close()


def test_a_new_guardian_waits_until_an_old_one_has_emptied_the_host(tmp_path: Path) -> None:
    """Law: what belongs to a run and starts under a new owner is not ended by the guardian of an old one."""
    run_id = secrets.token_hex(6)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, run_id, str(tmp_path / "guardian.log")], stdout=subprocess.PIPE, text=True
    )
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(300)"
    left = subprocess.Popen(
        [sys.executable, "-uc", stubborn], env={**os.environ, RUN_ID_ENV: run_id}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "up\n", "no owner"
        assert left.stdout is not None and left.stdout.readline() == "up\n"
        (old,) = guardians(run_id)
        assert ending_guardians(run_id) == [], "its owner lives"
        os.kill(old, signal.SIGSTOP)  # it is still to end the run when the next owner comes
        owner.kill()
        owner.wait()
        assert ending_guardians(run_id) == [old]
        threading.Timer(1.0, os.kill, (old, signal.SIGCONT)).start()
        new = HostGuardian(run_id, log_path=tmp_path / "new.log")
        assert left.poll() == -signal.SIGKILL, "the old one had done its work"
        child = subprocess.Popen(SLEEPER, env={**os.environ, RUN_ID_ENV: run_id})
        assert old not in guardians(run_id) and len(guardians(run_id)) == 1 and child.poll() is None
        new.close()
        assert child.wait(1) == -signal.SIGTERM
    finally:
        for process in (owner, left):
            process.kill()
            process.wait()


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
