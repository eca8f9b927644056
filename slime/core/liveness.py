"""`Silence`: decides whether an unresponsive process or task is still alive.

    silence = Silence(partial(processor_s, pids))
    ...
    silence.heard()                # on each response, token or heartbeat
    if silence.exceeds(limit_s):   # polled; True: treat the process as dead

Detects hung processes only; a process that exits is detected by its exit. The owner reports responses and polls. Each
poll also samples the process's CPU time and the size of a file that it writes. `Silence` never blocks and has no thread
of its own.

Invariants
1. A process that neither computes nor writes counts as hung after the limit. A process that does counts as alive until
   it has not responded for `WORKING` times the limit; then it is assumed to be in an infinite loop.
2. Limits are in seconds of a machine with one core per runnable thread. On an overloaded machine, or under an exhausted
   CPU quota, a second counts for less (`load`).
3. The time between two polls counts as at most `LONGEST_LOOK_S`. If the observer itself was suspended, it cannot tell
   whether the process was running.
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
"""Multiple of the limit allowed for a process that computes but does not respond."""
LEAST_SHARE = 0.1
"""A process counts as computing if it uses at least this fraction of a core. Idle or deadlocked polling uses less."""
MOST_LOAD = 20.0
"""Maximum load factor. A higher load, for example during a file server outage, does not extend limits further."""
LONGEST_LOOK_S = 5.0
"""Cap on the time that counts between two polls. Must be shorter than every limit that is checked by polling."""
LOOK_EVERY_S = 1.0


def load() -> float:
    """Estimates from the last minute how many times slower work is than on an idle machine. Returns at least 1.

    Uses the host's load average per core (even in a container) and the fraction of time that all threads were stalled
    by a CPU quota.
    """
    wanted = os.getloadavg()[0] / (os.cpu_count() or 1)
    stopped = 1 / max(1 - stalled_share(), 1 / MOST_LOAD)
    return min(max(1.0, wanted, stopped), MOST_LOAD)


def processor_s(pids: Iterable[int]) -> float:
    """Returns the total CPU time of these processes in seconds. Processes that have exited count as 0."""
    used_s = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            used_s += time.clock_gettime((~pid << 3) | 2)  # the process's CPU clock id
    return used_s


class Silence:
    """Watches one process or task. Any thread may call `heard`, but only one may call `exceeds`."""

    def __init__(
        self,
        used_s: Callable[[], float] | None = None,
        *,
        file: Path | None = None,
        begins_in_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`used_s`: returns the CPU time used so far; None if CPU use is not a sign of life. `file`: a file that the
        process writes. `begins_in_s`: grace period before silence counts."""
        self._used, self._file, self._clock = used_s, file, clock
        self._at = self._since = clock() + begins_in_s
        self._heard = False
        self._idle_s = self._silent_s = 0.0
        self._before = self._traces()

    @property
    def lasts_s(self) -> float:
        """Seconds between the last response and the last poll."""
        return self._at - self._since

    def heard(self) -> None:
        self._heard = True

    def exceeds(self, limit_s: float) -> bool:
        """Polls. Returns True after `limit_s` without a sign of life or `WORKING * limit_s` without a response."""
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
        try:
            written = self._file.stat().st_size if self._file is not None else 0
        except OSError:
            written = 0
        return self._used() if self._used is not None else 0.0, written


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """Returns the delay before the next retry. It doubles with each consecutive failure, up to `longest_s`."""
    return min(first_s * 2.0 ** min(failures - 1, 30), longest_s)


async def within(work: Awaitable[T], limit_s: float, silence: Silence | None = None) -> T:
    """Awaits `work` and returns its result. Raises `TimeoutError` if `silence` exceeds `limit_s` first."""
    silence, task = silence or Silence(), asyncio.ensure_future(work)
    try:
        while not silence.exceeds(limit_s):
            done, _ = await asyncio.wait([task], timeout=min(LOOK_EVERY_S, limit_s))
            if done:
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()
