"""An event loop for tests of deadlines on a machine that now and then stands still."""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Any

TURN_S = 0.05


class _ShortWaits(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> Any:
        return super().select(TURN_S if timeout is None else min(timeout, TURN_S))


class PatientLoop(asyncio.SelectorEventLoop):
    """A pause of the machine is no time: the clock advances by two turns at most between two looks at it."""

    def __init__(self) -> None:
        self._seen, self._now = time.monotonic(), 0.0
        super().__init__(_ShortWaits())

    def time(self) -> float:
        now = time.monotonic()
        self._now += min(now - self._seen, 2 * TURN_S)
        self._seen = now
        return self._now


class PatientPolicy(asyncio.DefaultEventLoopPolicy):
    """`asyncio.run` makes such a loop."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return PatientLoop()
