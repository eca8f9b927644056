"""`Watchdog`: names what keeps an event loop from turning, breaks it off at the limit, or ends the process by name.

    watchdog = Watchdog(asyncio.get_running_loop(), limit_s=1800.0, last_words=logs / LAST_WORDS)
    ...
    watchdog.close()

Consumes: turns of one event loop, which its thread asks for. Produces: a warning with the line that runs in the loop's
thread, `stall` for whoever asks from another thread, the longest stall, and where all else fails last words, which
`last_words` reads after the end. Waits for: the loop's answer. Is woken by: that, or the clock.

Invariants
1. At the limit user code that the interpreter runs is broken off by an exception, `MOST_BROKEN_OFF` times at most: its
   execution has expired, and the loop goes on.
2. What takes no exception (a sleep, a regular expression that holds the interpreter), or comes again and again, ends
   the process `GRACE_S` later. That is done by `faulthandler`, whose thread needs no interpreter; it writes where each
   thread stood.
3. Code of slime or of a library alone is never broken off.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import re
import sys
import threading
import time
import traceback
from pathlib import Path

from slime.core.blame import Place, blamed
from slime.rollout.threads import Stalled

logger = logging.getLogger(__name__)

LAST_WORDS = "rollout_stall.txt"
"""In the folder of the logs: what is left of a rollout side that had to end."""
WARN_S, GRACE_S = 10.0, 30.0
"""Seconds without a turn before the first warning, and between the attempt to break code off and the end."""
LOOK_S = 1.0
MOST_BROKEN_OFF = 3
"""Calls that are broken off; a function that blocks in every execution is not chance."""
_TIMED_OUT = "Timeout ("
"""How a report of `faulthandler` begins."""
_FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)', re.MULTILINE)


class Watchdog:
    """Watches from when it is made, on the loop's own thread, until `close`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        limit_s: float,
        last_words: Path | None = None,
        warn_s: float = WARN_S,
        grace_s: float = GRACE_S,
    ) -> None:
        """`limit_s`: seconds without a turn, 0 for no limit; `last_words`: the file for them, without one the process
        never ends.
        """
        self._loop, self._limit_s, self._warn_s, self._grace_s = loop, limit_s, warn_s, grace_s
        self._look_s = min(LOOK_S, warn_s / 4)
        self._watched = threading.get_ident()
        self._closed = threading.Event()
        self._longest_s, self._num_broken_off = 0.0, 0
        self.stall = ""
        """What keeps the loop from turning now, in words; empty while it turns."""
        self._path = last_words if limit_s else None
        self._file = None
        if self._path is not None:
            self._file = self._path.open("w")
            self._file.write(f"0x{self._watched:016x} {limit_s + grace_s:g}\n")
            self._file.flush()
        self._put_off_end()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def take_longest_s(self) -> float:
        """The longest time without a turn since the last call, seconds."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def close(self) -> None:
        """Watches no more; there are no last words."""
        self._closed.set()
        if self._path is not None and self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            self._path.unlink(missing_ok=True)

    def _watch(self) -> None:
        try:
            self._look()
        finally:  # who does not watch may not end anything
            if self._file is not None:
                faulthandler.cancel_dump_traceback_later()

    def _look(self) -> None:
        while not self._closed.wait(self._look_s):
            turned, asked = threading.Event(), time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._has_turned, turned)
            except RuntimeError:  # the loop is closed
                return
            self._wait(turned, asked)
            self._longest_s = max(self._longest_s, time.monotonic() - asked)
            self.stall = ""

    def _wait(self, turned: threading.Event, asked: float) -> None:
        """For a turn of the loop; says and does what is due meanwhile."""
        warn_s, was_broken = self._warn_s, not self._limit_s
        while not turned.wait(self._look_s) and not self._closed.is_set():
            stands_s = time.monotonic() - asked
            place = self._place()
            if stands_s >= self._warn_s:
                self.stall = f"the event loop has not turned for {stands_s:.0f} s: {place} keeps it"
            if stands_s >= warn_s:
                warn_s *= 2
                logger.warning("%s; do: await there, or call it in a thread (asyncio.to_thread)", self.stall)
            if stands_s >= self._limit_s and not was_broken:
                was_broken = True
                if place is not None and not place.is_ours and not place.is_library:
                    self._break_off()

    def _break_off(self) -> None:
        if self._num_broken_off < MOST_BROKEN_OFF:
            self._num_broken_off += 1
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._watched), ctypes.py_object(Stalled))

    def _has_turned(self, turned: threading.Event) -> None:
        """On the loop."""
        turned.set()
        self._put_off_end()

    def _put_off_end(self) -> None:
        if self._file is not None and not self._closed.is_set():
            faulthandler.dump_traceback_later(self._limit_s + self._grace_s, exit=True, file=self._file)

    def _place(self) -> Place | None:
        """What runs on the loop now: who started the loop does not count."""
        frame = sys._current_frames().get(self._watched)
        stack = traceback.extract_stack(frame) if frame is not None else []
        begin = max((number for number, one in enumerate(stack, 1) if one.name == "run_forever"), default=0)
        return blamed(Place(one.filename, one.lineno or 0, one.name) for one in stack[begin:])


def last_words(path: Path) -> str | None:
    """Why the process that was to write there has ended itself; None if it has not."""
    with contextlib.suppress(OSError):
        head, _, report = path.read_text(errors="replace").partition("\n")
        if _TIMED_OUT not in report:
            return None
        thread, _, limit_s = head.partition(" ")
        of_thread = report.partition(f"Thread {thread}")[2].partition("\n\n")[0]
        found = [Place(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(of_thread)]
        return (
            f"the event loop of the rollout side has not turned for {limit_s} s (--execution-timeout-s), because "
            f"{blamed(reversed(found)) or 'something'} kept it, and its process has ended; do: await there, or call it "
            "in a thread (asyncio.to_thread)"
        )
    return None
