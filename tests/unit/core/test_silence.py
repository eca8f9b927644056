"""Laws of silence: what counts as a sign of life, measured at processes, and what a busy machine does to a limit."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from slime.core import silence
from slime.core.silence import LEAST_SHARE, MOST_LOAD, WORKING, Silence, load, processor_s, within

WORKS = "import time\nwhile True: pass"
NICE = f"import os; os.nice(19)\n{WORKS}"
IDLE = "import time\nwhile True: time.sleep(0.02)"
"""A thread that looks at something now and then, as those of a scheduler that hangs do."""


def share_of_a_core(code: str, *, stopped: bool = False) -> float:
    """What a process uses, by its own look of about a third of a second."""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            while processor_s([process.pid]) < 0.02:  # it has begun
                time.sleep(0.01)
            time.sleep(0.1)
            if stopped:
                os.kill(process.pid, signal.SIGSTOP)
            began, used_s = time.monotonic(), processor_s([process.pid])
            time.sleep(0.3)
            return (processor_s([process.pid]) - used_s) / (time.monotonic() - began)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("code", "stopped", "works"),
    [(WORKS, False, True), (NICE, False, None), (IDLE, False, False), (WORKS, True, False)],
)
def test_processor_time_tells_who_works(code: str, stopped: bool, works: bool | None) -> None:
    """None: one that everybody else goes before uses what is left, at which the load says how little to expect."""
    share = share_of_a_core(code, stopped=stopped)
    assert share > 0.0 if works is None else (share * load() > LEAST_SHARE) == works


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
    monkeypatch.setattr(silence, "load", lambda: 1.0)
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
    monkeypatch.setattr(silence, "load", lambda: 1.0)

    async def work() -> None:
        assert await within(asyncio.sleep(0, "answer"), 5.0) == "answer"
        pending = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await within(pending, 0.2, one := Silence(partial(processor_s, [])))
        assert pending.cancelled() and 0.2 <= one.lasts_s <= time.monotonic() - began

    asyncio.run(work())
