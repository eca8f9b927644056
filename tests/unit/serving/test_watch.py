"""Laws of the watch over a server: what shows at once, what shows after its limit, and what is no trouble."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.core import liveness
from slime.serving import child_process as process_module
from slime.serving.child_process import ChildProcess
from slime.serving.watch import ServerWatch

NAMED = """
import ctypes, os, sys, time
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, b"sglang::schedul", 0, 0, 0)
    print("child", os.getpid(), flush=True)
time.sleep(600)
"""
"""A process with a child that is called as SGLang calls its schedulers."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def one_core_each(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The load of the machine, which a test may change."""
    now = [1.0]
    monkeypatch.setattr(liveness, "load", lambda: now[0])
    return now


def watch(clock: Clock, answers: bool, used_s: Callable[[], float] | None = None) -> ServerWatch:
    asked = threading.Event()

    def answer(timeout_s: float) -> bool:
        asked.set()
        return answers

    made = ServerWatch(lambda: None, answer, interval_s=5.0, timeout_s=30.0, used_s=used_s, clock=clock)
    assert asked.wait(30)
    made.close()
    made._thread.join(30)
    return made


def looked_at(made: ServerWatch, clock: Clock, seconds: int) -> list[str | None]:
    """What it says in each of these seconds."""
    said = []
    for _ in range(seconds):
        clock.now += 1.0
        said.append(made.trouble())
    return said


def test_a_scheduler_is_hung_after_its_limit_and_not_before() -> None:
    made = watch(clock := Clock(), answers=False)
    assert looked_at(made, clock, 35) == [None] * 35
    assert "has not responded for 36 s" in str(looked_at(made, clock, 1)[0])


@pytest.mark.parametrize(
    ("load", "share", "brings_tokens", "lasts_s"),
    [
        (1.0, 0.02, False, 36),  # a thread that looks at something now and then
        (4.0, 0.0, False, 141),  # two cores, eight that want one
        (1.0, 0.3, False, 176),  # a batch that takes long; a loop without an end
        (4.0, 0.3, False, 701),
        (1.0, 0.0, True, None),
    ],
)
def test_the_silence_of_a_scheduler_is_counted_by_what_it_can_and_does(
    one_core_each: list[float], load: float, share: float, brings_tokens: bool, lasts_s: int | None
) -> None:
    """Law: who gets no core, computes or brings tokens is not hung; who computes without an end is, after longer."""
    one_core_each[0] = load
    made = watch(clock := Clock(), answers=False, used_s=lambda: share * clock.now)
    for second in range(1, 1000):
        if brings_tokens and second % 10 == 0:
            made.heard()
        if (trouble := looked_at(made, clock, 1)[0]) is not None:
            assert second == lasts_s and f"for {second} s" in trouble
            return
    assert lasts_s is None


def test_a_watch_that_did_not_run_itself_knows_nothing_of_the_time() -> None:
    """The process of the watch was stopped, and so the thread that asks was."""
    made = watch(clock := Clock(), answers=False)
    clock.now += 600.0
    assert made.trouble() is None
    assert looked_at(made, clock, 30) == [None] * 30
    assert looked_at(made, clock, 1) != [None]


def test_one_that_loads_weights_may_be_silent_and_its_silence_begins_afterwards() -> None:
    made = watch(clock := Clock(), answers=False)
    clock.now = 500.0
    assert made.trouble(expects_answers=False) is None
    assert looked_at(made, clock, 35) == [None] * 35
    assert looked_at(made, clock, 1) != [None]


def test_what_is_wrong_with_processes_is_said_first() -> None:
    made = ServerWatch(lambda: "process 7 is stopped", lambda _: True, interval_s=5.0, timeout_s=30.0)
    assert made.trouble() == "process 7 is stopped"
    made.close()


def wait_for_problem(process: ChildProcess, sign: str) -> None:
    deadline = time.monotonic() + 60
    while sign not in (problem := process.problem() or ""):
        assert time.monotonic() < deadline, f"it says {problem!r}"
        time.sleep(0.05)


def test_a_stopped_a_lost_and_an_ended_process_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = ChildProcess("engine x", [sys.executable, "-c", NAMED], log_path=tmp_path / "log")
    process.start()
    try:
        while (said := re.search(r"^child (\d+)$", process.log_tail(), re.MULTILINE)) is None:
            time.sleep(0.05)
        child, host = int(said[1]), socket.gethostname()
        while process.problem() is not None or child not in process._named:
            time.sleep(0.05)
        subprocess.run(["kill", "-STOP", str(child)], check=True)  # as a debugger does for a moment
        assert [process.problem() for _ in range(3)] == [None] * 3
        monkeypatch.setattr(process_module, "STOPPED_LIMIT_S", 0.2)
        wait_for_problem(process, f"sglang::schedul of engine x on {host} is stopped")
        subprocess.run(["kill", "-CONT", str(child)], check=True)
        while process.problem() is not None:
            time.sleep(0.05)
        subprocess.run(["kill", "-KILL", str(child)], check=True)
        wait_for_problem(process, f"sglang::schedul of engine x on {host} has exited")
        subprocess.run(["kill", "-KILL", str(process.pid)], check=True)
        wait_for_problem(process, f"engine x on {host} was killed by SIGKILL; its log is {tmp_path / 'log'}")
    finally:
        process.stop()
