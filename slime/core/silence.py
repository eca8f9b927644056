"""`Silence`: whether something that does not answer still lives.

    silence = Silence(partial(processor_s, pids))
    ...
    silence.heard()                # at an answer, a token, a renewal: what is waited for
    if silence.exceeds(limit_s):   # again and again: it counts as dead

What has ended is seen by its exit, without any limit. This is for what runs and says nothing. Consumes: answers, and at
each look the processor time that it has used and the size of what it writes. Produces: the time without a sign of life.
Waits for nothing, and is woken by nothing.

Invariants
1. Whoever uses a core, or writes, lives: it may leave unanswered for `WORKING` times the limit, and is then hung in a
   loop. One that does neither is hung after the limit.
2. Limits are in seconds of a machine with a core for each thread that wants one: with less, or under a CPU quota that
   is used up, a second counts less (`load`).
3. Time in which nobody looked counts as `LONGEST_LOOK_S` at most: who did not run himself knows nothing of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

from slime.core.cores import stalled_share

T = TypeVar("T")

WORKING = 5.0
"""Limits that something may leave unanswered that works."""
LEAST_SHARE = 0.1
"""Of a core: what is idle or deadlocked uses less, in threads that look at something now and then."""
MOST_LOAD = 20.0
"""A load that is higher, as of a file server that is away, makes no limit longer."""
LONGEST_LOOK_S = 5.0
"""Less than any limit of something that is looked at again and again."""
LOOK_EVERY_S = 1.0
"""In `within`."""


def load() -> float:
    """How many times longer than on an idle machine work takes here, by the last minute; at least 1.

    Threads of the host that want a core, for each core that it has. Both numbers are the host's in a container, too; a
    CPU quota shows in the time for which it stops all threads.
    """
    wanted = os.getloadavg()[0] / (os.cpu_count() or 1)
    stopped = 1 / max(1 - stalled_share(), 1 / MOST_LOAD)
    return min(max(1.0, wanted, stopped), MOST_LOAD)


def processor_s(pids: Iterable[int]) -> float:
    """Processor time that these processes have used so far, in seconds; one that is gone has used none."""
    used_s = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            used_s += time.clock_gettime((~pid << 3) | 2)  # the clock id of another process, as the kernel makes it
    return used_s


class Silence:
    """Of one thing that is to answer. `heard` may be called from any thread, `exceeds` from one."""

    def __init__(
        self,
        used_s: Callable[[], float] | None = None,
        *,
        file: Path | None = None,
        begins_in_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`used_s`: processor time of what is to answer so far, where using it is a sign of life; `file`: what it
        writes; `begins_in_s`: it may be silent for so long first."""
        self._used, self._file, self._clock = used_s, file, clock
        self._at = self._since = clock() + begins_in_s
        self._heard = False
        self._idle_s = self._silent_s = 0.0
        self._before = self._traces()

    @property
    def lasts_s(self) -> float:
        """Seconds by the clock without an answer, at the last look."""
        return self._at - self._since

    def heard(self) -> None:
        """It has answered."""
        self._heard = True

    def exceeds(self, limit_s: float) -> bool:
        """Looks once: whether it has been without a sign of life for so long, or works without an answer for
        `WORKING` times as long."""
        passed_s = self._clock() - self._at
        if passed_s > 0:
            self._at += passed_s
            took_s, before = min(passed_s, LONGEST_LOOK_S), self._before
            used_s, written = self._before = self._traces()
            works = used_s - before[0] >= LEAST_SHARE * took_s or written > before[1]
            counted_s = took_s / load()
            self._silent_s += counted_s
            self._idle_s += 0.0 if works else counted_s
        if self._heard:
            self._heard, self._since, self._idle_s, self._silent_s = False, self._at, 0.0, 0.0
        return self._idle_s > limit_s or self._silent_s > WORKING * limit_s

    def _traces(self) -> tuple[float, int]:
        """What grows while it works: processor time, and what it has written."""
        try:
            written = self._file.stat().st_size if self._file is not None else 0
        except OSError:
            written = 0
        return self._used() if self._used is not None else 0.0, written


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """Seconds to wait before the next try after so many failures in a row: doubled each time, up to `longest_s`."""
    return min(first_s * 2.0 ** min(failures - 1, 30), longest_s)


async def within(work: Awaitable[T], limit_s: float, silence: Silence | None = None) -> T:
    """The result of what waits for something. Raises `TimeoutError` if that is silent for longer than `limit_s`."""
    silence, task = silence or Silence(), asyncio.ensure_future(work)
    try:
        while not silence.exceeds(limit_s):
            done, _ = await asyncio.wait([task], timeout=min(LOOK_EVERY_S, limit_s))
            if done:
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()
