"""Laws of silence: what counts as a sign of life, measured at processes, and what a busy machine does to a limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from slime.core import liveness
from slime.core.liveness import LEAST_SHARE, MOST_LOAD, WORKING, Silence, load, processor_s, within

WORKS = "import time\nwhile True: pass"
NICE = f"import os; os.nice(19)\n{WORKS}"
IDLE = "import time\nwhile True: time.sleep(0.05)"
"""A thread that looks at something now and then, as those of a scheduler that hangs do."""


@contextlib.contextmanager
def running(code: str) -> Iterator[int]:
    """The id of a process that has begun to run `code`."""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            while processor_s([process.pid]) < 0.02:
                time.sleep(0.01)
            time.sleep(0.1)
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("code", [WORKS, NICE])
def test_a_process_that_computes_uses_processor_time(code: str) -> None:
    """On a busy machine it takes longer to use a tenth of a second; the time limit of the test is the only one."""
    with running(code) as pid:
        used_s = processor_s([pid])
        while processor_s([pid]) < used_s + 0.1:
            time.sleep(0.01)


@pytest.mark.parametrize(("code", "stopped"), [(IDLE, False), (WORKS, True)])
def test_a_process_that_polls_or_is_stopped_uses_less_than_one_that_computes(code: str, stopped: bool) -> None:
    with running(code) as pid:
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        began, used_s = time.monotonic(), processor_s([pid])
        time.sleep(0.3)
        assert (processor_s([pid]) - used_s) / (time.monotonic() - began) < LEAST_SHARE


def test_who_is_gone_has_used_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert processor_s([process.pid]) == 0.0


def test_a_limit_grows_with_those_who_want_a_core_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanting, factor in ((0.0, 1.0), (0.9, 1.0), (4.0, 4.0), (1e6, MOST_LOAD)):
        monkeypatch.setattr(os, "getloadavg", lambda n=wanting: (n * (os.cpu_count() or 1), 0.0, 0.0))
        assert load() == factor
        now = [0.0]
        one = Silence(clock=lambda now=now: now[0])
        looks = 0
        while not one.exceeds(10.0):
            now[0] += 1.0
            looks += 1
        assert looks == pytest.approx(10 * factor, abs=1.01)


def test_what_is_written_is_a_sign_of_life_and_an_end_comes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "load", lambda: 1.0)
    now, log = [0.0], tmp_path / "log"
    one = Silence(file=log, clock=lambda: now[0])
    over = []
    for second in range(100):
        now[0] += 1.0
        log.write_text("." * second)
        over.append(one.exceeds(10.0))
    assert over.index(True) == 10 * WORKING
    one.heard()
    assert not one.exceeds(10.0) and one.lasts_s == 0.0


def test_a_wait_ends_with_the_answer_or_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "load", lambda: 1.0)

    async def work() -> None:
        assert await within(asyncio.sleep(0, "answer"), 5.0) == "answer"
        pending = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await within(pending, 0.2, one := Silence(partial(processor_s, [])))
        assert pending.cancelled() and 0.2 <= one.lasts_s <= time.monotonic() - began

    asyncio.run(work())
