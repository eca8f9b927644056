"""What the start of a run is doing, and how long each phase of it took.

Called by the driver, from one thread. A phase that ends is one line on the console; all phases together are
`startup/*` metrics of the first step, so that its own times hold nothing of the start.

Invariants
1. After `end` nothing is recorded any more: what looks like a phase is then part of a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from slime.observability.progress import duration

logger = logging.getLogger("slime.startup")


class StartUp:
    """The phases of one start. Phases may overlap: engines and trainers start side by side."""

    def __init__(self, began_s: float | None = None) -> None:
        """`began_s`: when the start began, of `time.monotonic()`; default: now."""
        self._began_s = time.monotonic() if began_s is None else began_s
        self._seconds: dict[str, float] = {}
        self._over = False

    @contextmanager
    def phase(self, name: str, line: str) -> Iterator[None]:
        """Times the block as phase `name` of the metrics; `line`: what is done when it ends, for the console."""
        start_s = time.monotonic()
        yield
        self.done(name, line, time.monotonic() - start_s)

    def done(self, name: str, line: str, seconds: float) -> None:
        """A phase ended after so many seconds."""
        if self._over:
            return
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        logger.info("%s, %.1f s", line, seconds)

    def part(self, name: str, seconds: float) -> None:
        """A part of a phase: a metric, no line."""
        if not self._over:
            self._seconds[name] = seconds

    def end(self) -> dict[str, float]:
        """First step begins: `startup/<phase>_time` of all phases and `startup/total_time`. Later calls: nothing."""
        if self._over:
            return {}
        self._over = True
        total_s = time.monotonic() - self._began_s
        logger.info("the start took %s; the first step begins", duration(total_s))
        return {f"startup/{name}_time": seconds for name, seconds in self._seconds.items()} | {
            "startup/total_time": total_s
        }
