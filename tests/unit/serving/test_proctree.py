"""Families of processes: found by mark, ancestry and session; ended completely; nobody else touched."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from slime.serving.child_process import ProcessFamily, read_stat

SLEEP = "import time; time.sleep(300)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
)
RENAMED = "import setproctitle, time; setproctitle.setproctitle('x' * 400); print('up', flush=True); time.sleep(300)"


def start(code: str, **kwargs: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **kwargs)  # type: ignore[call-overload, no-any-return]


def eventually(condition: Callable[[], bool], limit_s: float = 5.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def test_a_detached_grandchild_that_ignores_sigterm_is_ended_and_a_stranger_is_not() -> None:
    mark = secrets.token_hex(8)
    spawn = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True)"
    stranger = start(SLEEP)
    parent = start(spawn, env={**os.environ, "MARK": mark}, start_new_session=True)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
        parent.wait()  # the grandchild has no parent of ours any more, and a session of its own
        family = ProcessFamily("MARK", mark)
        living = family.refresh()
        assert len(living) == 1
        assert family.end(grace_s=0.3) == []
        assert read_stat(living[0].id.pid) is None or read_stat(living[0].id.pid).state == "Z"  # type: ignore[union-attr]
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_member_that_erased_its_environment_is_remembered() -> None:
    mark = secrets.token_hex(8)
    env = {k: v for k, v in os.environ.items() if k != "SPT_NOENV"} | {"MARK": mark}
    child = start("input();" + RENAMED, env=env, stdin=subprocess.PIPE)
    try:
        family = ProcessFamily("MARK", mark)
        assert eventually(lambda: len(family.refresh()) == 1)
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"up\n"
        assert [s.id.pid for s in family.refresh()] == [child.pid]
    finally:
        child.kill()
        child.wait()


def test_the_caller_and_its_ancestors_are_never_members() -> None:
    family = ProcessFamily("PATH", os.environ["PATH"], seeds=[os.getpid(), os.getppid()])
    members = {s.id.pid for s in family.refresh()}
    assert not members & {os.getpid(), os.getppid()}


def test_a_recycled_pid_is_not_signalled() -> None:
    import dataclasses

    child = start(SLEEP)
    try:
        stat = read_stat(child.pid)
        assert stat is not None
        older = dataclasses.replace(stat, id=dataclasses.replace(stat.id, start_ticks=stat.id.start_ticks - 1))
        ProcessFamily("NOBODY", "0").signal(signal.SIGKILL, [older])
        time.sleep(0.1)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
