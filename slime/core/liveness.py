"""`Silence`: decides whether a process or task that does not respond is still alive.

    silence = Silence(partial(processor_s, pids))
    ...
    silence.heard()                # at each response, token or renewal
    if silence.exceeds(limit_s):   # polled; True: the process counts as dead

This is for processes that run without responding; the end of a process is noticed by its exit. Consumes: responses, and
at each poll the used processor time and the size of the written file. Produces: the time without a sign of life. Waits
for nothing and is woken by nothing.

Invariants
1. A process that computes or writes is alive, until it has not responded for `WORKING` times the limit. Then it counts
   as caught in an endless loop. A process that neither computes nor writes counts as hung after the limit.
2. Limits are in seconds of a machine with a core for each runnable thread. On a loaded machine, or under an exhausted
   CPU quota, a second counts less (`load`).
3. The time between two polls counts as at most `LONGEST_LOOK_S`. If the observer itself did not run for a while, it
   cannot tell whether the process ran.
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
"""Factor on the limit for a process that computes without responding."""
LEAST_SHARE = 0.1
"""A process that uses at least this share of a core is computing. Idle or deadlocked processes that poll use less."""
MOST_LOAD = 20.0
"""Higher loads, such as during an outage of a file server, do not extend limits further."""
LONGEST_LOOK_S = 5.0
"""The most that the time between two polls counts. Must be shorter than every limit that is checked by polling."""
LOOK_EVERY_S = 1.0


def load() -> float:
    """Returns the factor by which work takes longer than on an idle machine, judged by the last minute; at least 1.

    Uses the host's runnable threads per core, also in a container, and the share of time in which a CPU quota stopped
    all threads.
    """
    wanted = os.getloadavg()[0] / (os.cpu_count() or 1)
    stopped = 1 / max(1 - stalled_share(), 1 / MOST_LOAD)
    return min(max(1.0, wanted, stopped), MOST_LOAD)


def processor_s(pids: Iterable[int]) -> float:
    """Returns the processor time of these processes in seconds; a process that has ended counts as 0."""
    used_s = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            used_s += time.clock_gettime((~pid << 3) | 2)  # the kernel's clock id of that process
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
        """`used_s`: returns the processor time used so far, if that is a sign of life. `file`: a file that the process
        writes. `begins_in_s`: extra silence allowed at the beginning."""
        self._used, self._file, self._clock = used_s, file, clock
        self._at = self._since = clock() + begins_in_s
        self._heard = False
        self._idle_s = self._silent_s = 0.0
        self._before = self._traces()

    @property
    def lasts_s(self) -> float:
        """Seconds from the last response to the last poll."""
        return self._at - self._since

    def heard(self) -> None:
        self._heard = True

    def exceeds(self, limit_s: float) -> bool:
        """Polls. Returns True after `limit_s` without a sign of life, or `WORKING` times that without a response."""
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
    """Returns the seconds to wait before the next try. Doubles with each failure in a row, up to `longest_s`."""
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
