"""A function that keeps the event loop from turning is named, broken off, or ends its process by name."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import DeadlineExceeded
from slime.rollout.guard import Watchdog, last_words, supervised
from slime.rollout.manager import RolloutManager
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import rollout_args, with_manager
from tests.unit.rollout.hanging_hooks import LET_GO, sleep_until

HOOKS = "tests.unit.rollout.hanging_hooks"
REWARD = ("--custom-rm-path", f"{Path(__file__).with_name('rollout_hooks.py')}:reward")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    LET_GO.clear()
    yield
    LET_GO.set()


class Seen(logging.Handler):
    """Ends the wait of a function when it has been named."""

    def __init__(self) -> None:
        super().__init__()
        self.event, self.lines = threading.Event(), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.event.set()


def test_a_stall_is_named_with_its_line_and_measured() -> None:
    seen, logger = Seen(), logging.getLogger("slime.rollout.guard")

    async def work() -> float:
        watchdog = Watchdog(asyncio.get_running_loop(), limit_s=0.0, warn_s=0.1)
        try:
            await asyncio.sleep(0.2)
            sleep_until(seen.event)
            while watchdog.stall:
                await asyncio.sleep(0.01)
            return watchdog.take_longest_s()
        finally:
            watchdog.close()

    logger.addHandler(seen)
    try:
        longest_s = asyncio.run(work())
    finally:
        logger.removeHandler(seen)
    assert re.search(r"hanging_hooks\.py:\d+ in sleep_until has blocked the event loop", seen.lines[0]), seen.lines
    assert longest_s >= 0.1


def test_code_that_runs_is_broken_off_and_the_loop_goes_on() -> None:
    async def blocks() -> None:
        sleep_until(LET_GO)

    async def work() -> str:
        watchdog = Watchdog(asyncio.get_running_loop(), limit_s=0.2, warn_s=0.1)
        try:
            with pytest.raises(DeadlineExceeded, match=r"raised at .*hanging_hooks\.py:\d+ in sleep_until"):
                await supervised(blocks(), what="mine", limit_s=None)
            return await supervised(asyncio.sleep(0.01, "turns"), what="other", limit_s=None)
        finally:
            watchdog.close()

    assert asyncio.run(work()) == "turns"


def test_a_step_goes_on_without_an_execution_that_blocks(tmp_path: Path) -> None:
    async def work(manager: RolloutManager) -> Any:
        watchdog = Watchdog(asyncio.get_running_loop(), limit_s=2.0, warn_s=1.0)
        try:
            batch, metrics = await manager.generate(0)
        finally:
            watchdog.close()
        return {s.group_index for s in batch.samples}, metrics

    args = rollout_args(tmp_path, *REWARD, "--custom-generate-function-path", f"{HOOKS}:blocks")
    trained, metrics = asyncio.run(with_manager(args, FakeEngine(), work))
    assert trained == {1, 2, 3, 4} and metrics["rollout/num_quarantined_groups"] == 1


@pytest.mark.parametrize(
    "blocking",
    ["time.sleep(10_000)", "re.match('(a+)+$', 'a' * 64 + 'b')", "again_and_again()"],
    ids=["sleeps", "holds-the-interpreter", "catches-everything"],
)
def test_what_cannot_be_broken_off_ends_the_process_by_name(tmp_path: Path, blocking: str) -> None:
    script, said = tmp_path / "mine.py", tmp_path / "last_words"
    script.write_text(
        "import asyncio, re, sys, time\n"
        "from pathlib import Path\n"
        "from slime.rollout.guard import Watchdog\n"
        "def again_and_again():\n"
        "    while True:\n"
        "        try: time.sleep(0.01)\n"
        "        except BaseException: pass\n"
        "async def theirs():\n"
        f"    {blocking}\n"
        "async def main():\n"
        "    loop = asyncio.get_running_loop()\n"
        "    Watchdog(loop, limit_s=0.5, last_words=Path(sys.argv[1]), warn_s=0.2, grace_s=0.5)\n"
        "    await theirs()\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, script, said], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1, ended.stderr
    found, name = last_words(said), "again_and_again" if "again" in blocking else "theirs"
    assert (
        found is not None
        and f"{script}:" in found
        and f" in {name} blocked the rollout's event loop" in found
        and "--execution-timeout-s" in found
    )


def test_a_process_that_ends_otherwise_leaves_no_last_words(tmp_path: Path) -> None:
    said = tmp_path / "last_words"

    async def work() -> str | None:
        watchdog = Watchdog(asyncio.get_running_loop(), limit_s=100.0, last_words=said)
        await asyncio.sleep(0.01)
        while_it_lives = last_words(said)
        watchdog.close()
        return while_it_lives

    assert asyncio.run(work()) is None and last_words(said) is None and not said.exists()


def test_the_fourth_function_that_blocks_ends_the_process(tmp_path: Path) -> None:
    """Law: a function that blocks in every execution costs a few limits, not one for each."""
    script, said = tmp_path / "mine.py", tmp_path / "last_words"
    script.write_text(
        "import asyncio, sys, time\n"
        "from pathlib import Path\n"
        "from slime.core.errors import DeadlineExceeded\n"
        "from slime.rollout.guard import supervised\n"
        "from slime.rollout.guard import Watchdog\n"
        "async def blocks():\n"
        "    while True: time.sleep(0.01)\n"
        "async def main():\n"
        "    loop = asyncio.get_running_loop()\n"
        "    Watchdog(loop, limit_s=0.3, last_words=Path(sys.argv[1]), warn_s=0.2, grace_s=3.0)\n"
        "    while True:\n"
        "        try: await supervised(blocks(), what='mine', limit_s=None)\n"
        "        except DeadlineExceeded: print('failed', flush=True)\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, script, said], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1 and ended.stdout == 3 * "failed\n", ended.stderr
    assert f"{script}:7 in blocks blocked the rollout's event loop" in (last_words(said) or "")
