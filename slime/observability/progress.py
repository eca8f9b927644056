"""Progress display for long operations (a bar on a terminal, else a line every ten seconds), and startup phases.

The worker calls `advance` or `note`, and a daemon thread of each `Progress` prints. If the worker calls neither for a
while, the line says how long there has been no progress.

Invariants
1. Nothing is printed for operations that finish within the first interval.
2. Leaving the block stops the thread, even after an exception.
3. A note may contain text from a model, so it is printed on one line with control characters escaped and no markup.
4. No phase is recorded after `StartUp.end`, because it would belong to a step.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from slime.core.text import one_line

logger = logging.getLogger("slime.progress")

NOTE_CHARS = 300
"""Maximum length of a note."""


class Progress:
    """`with Progress("rollout, step 3", total=96, unit="samples") as p: ... p.advance()`.

    `total`: None if unknown (startup, a wait); there is no ETA then. `limit_s`: timeout, only displayed. `tty`: draw a
    bar (None: if stderr is a terminal). `console`: rich console for the bar (None: stderr).
    """

    def __init__(
        self,
        what: str,
        *,
        total: int | None = None,
        unit: str = "",
        limit_s: float | None = None,
        every_s: float = 10.0,
        tty: bool | None = None,
        console: Any = None,
    ) -> None:
        self.what, self.total, self.unit, self.limit_s, self.every_s = what, total, unit, limit_s, every_s
        self.done = 0
        self._note = ""
        self._start_s = self._moved_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"progress {what}", daemon=True)
        self._tty = sys.stderr.isatty() if tty is None else tty
        self._console = console
        self._bar: Any = None
        self._bar_task: Any = None

    def __enter__(self) -> Progress:
        self._start_s = self._moved_s = time.monotonic()
        if self._tty:
            self._open_bar()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num: int = 1) -> None:
        self.done += num
        self._moved_s = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar_task, advance=num)

    def note(self, text: str) -> None:
        """Sets the text at the end of the line. Changing the text counts as progress."""
        text = one_line(text, NOTE_CHARS)
        if text == self._note:
            return
        self._note = text
        self._moved_s = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar_task, description=f"{self.what}: {text}" if text else self.what)

    def line(self, now_s: float | None = None) -> str:
        now_s = time.monotonic() if now_s is None else now_s
        elapsed_s, silent_s = now_s - self._start_s, now_s - self._moved_s
        parts = [f"{self.what}:"]
        if self.total is not None:
            parts.append(f"{self.done}/{self.total} {self.unit}".rstrip() + ",")
        parts.append(duration(elapsed_s))
        if self.limit_s is not None:
            parts.append(f"of at most {duration(self.limit_s)}")
        if self.total is not None and 0 < self.done < self.total:
            parts.append(f"(about {duration(elapsed_s / self.done * (self.total - self.done))} left)")
        if self._note:
            parts.append(f"- {self._note}")
        if (self.done or self._note) and silent_s > 2 * self.every_s:
            parts.append(f"- no progress for {duration(silent_s)}")
        return " ".join(parts)

    def _beat(self) -> None:
        while not self._stop.wait(self.every_s):
            if self._bar is None:
                logger.info("%s", self.line())

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True) if self._console is None else self._console
        what = TextColumn("{task.description}", markup=False)
        columns = [what, BarColumn(), TimeElapsedColumn()]
        if self.total is not None:  # otherwise they would show 0/? and -:--:--
            columns = [what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
        self._bar = Bar(*columns, console=console, transient=True)
        self._bar_task = self._bar.add_task(self.what, total=self.total)
        self._bar.start()


def duration(seconds: float) -> str:
    """Formats a duration: `8 s`, `2 min 05 s`, `1 h 03 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


startup_logger = logging.getLogger("slime.startup")


class StartUp:
    """The phases of a run's startup, which may overlap. Only used from the driver's thread.

    Each phase is logged when it finishes. All phases become `startup/*` metrics of the first step, so that the step's
    own timings do not include startup.
    """

    def __init__(self, began_s: float | None = None) -> None:
        """`began_s`: `time.monotonic()` when startup began; default: now."""
        self._began_s = time.monotonic() if began_s is None else began_s
        self._seconds: dict[str, float] = {}
        self._over = False

    @contextmanager
    def phase(self, name: str, line: str) -> Iterator[None]:
        """Times the block as phase `name`. `line`: logged when the phase ends."""
        start_s = time.monotonic()
        yield
        self.done(name, line, time.monotonic() - start_s)

    def done(self, name: str, line: str, seconds: float) -> None:
        if not self._over:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            startup_logger.info("%s, %.1f s", line, seconds)

    def part(self, name: str, seconds: float) -> None:
        """Records part of a phase as a metric without logging it."""
        if not self._over:
            self._seconds[name] = seconds

    def end(self) -> dict[str, float]:
        """Ends startup. The first call returns `startup/<phase>_time` for all phases and `startup/total_time`."""
        if self._over:
            return {}
        self._over = True
        total_s = time.monotonic() - self._began_s
        startup_logger.info("startup took %s; the first step begins", duration(total_s))
        return {f"startup/{name}_time": seconds for name, seconds in {**self._seconds, "total": total_s}.items()}
