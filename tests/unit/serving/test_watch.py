"""Laws of the watch over a server: what shows at once, what shows after its limit, and what is no trouble."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from slime.serving.process import ChildProcess
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


def watch(clock: Clock, answers: bool) -> ServerWatch:
    asked = threading.Event()

    def answer(timeout_s: float) -> bool:
        asked.set()
        return answers

    made = ServerWatch(lambda: None, answer, interval_s=5.0, timeout_s=30.0, clock=clock)
    assert asked.wait(30)
    made.close()
    made._thread.join(30)
    return made


def test_a_scheduler_is_hung_after_its_limit_and_not_before() -> None:
    clock = Clock()
    made = watch(clock, answers=False)
    clock.now = 34.0
    assert made.trouble() is None
    clock.now = 36.0
    assert "has not answered for 36 s" in str(made.trouble())


def test_one_that_loads_weights_may_be_silent_and_its_silence_begins_afterwards() -> None:
    clock = Clock()
    made = watch(clock, answers=False)
    clock.now = 500.0
    assert made.trouble(expects_answers=False) is None
    clock.now = 530.0
    assert made.trouble() is None
    clock.now = 540.0
    assert made.trouble() is not None


def test_what_is_wrong_with_processes_is_said_first() -> None:
    made = ServerWatch(lambda: "process 7 is stopped", lambda _: True, interval_s=5.0, timeout_s=30.0)
    assert made.trouble() == "process 7 is stopped"
    made.close()


def wait_for_problem(process: ChildProcess, sign: str) -> None:
    deadline = time.monotonic() + 60
    while sign not in (problem := process.problem() or ""):
        assert time.monotonic() < deadline, f"it says {problem!r}"
        time.sleep(0.05)


def test_a_stopped_a_lost_and_an_ended_process_show(tmp_path: Path) -> None:
    process = ChildProcess("engine x", [sys.executable, "-c", NAMED], log_path=tmp_path / "log")
    process.start()
    try:
        while (said := re.search(r"^child (\d+)$", process.log_tail(), re.MULTILINE)) is None:
            time.sleep(0.05)
        child = int(said[1])
        while process.problem() is not None or child not in process._named:
            time.sleep(0.05)
        subprocess.run(["kill", "-STOP", str(child)], check=True)
        wait_for_problem(process, f"process {child} (sglang::schedul) of engine x is stopped")
        subprocess.run(["kill", "-CONT", str(child)], check=True)
        while process.problem() is not None:
            time.sleep(0.05)
        subprocess.run(["kill", "-KILL", str(child)], check=True)
        wait_for_problem(process, f"process {child} (sglang::schedul) of engine x has ended")
        subprocess.run(["kill", "-KILL", str(process.pid)], check=True)
        wait_for_problem(process, f"engine x ended with status -9; read {tmp_path / 'log'}")
    finally:
        process.stop()
