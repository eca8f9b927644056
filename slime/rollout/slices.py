"""`Slices`: many small calls, of which the event loop makes some in each turn, so that others get their turn.

Consumes: callables (`add`). Produces: their calls, in their order. Waits for nothing: the event loop goes on with them.
A thousand tasks that are woken at once all run in one turn, and nothing else runs until the last of them has.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

IN_ONE_TURN = 64


class Slices:
    """Use on one event loop."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self._due = False

    def add(self, work: Iterable[Callable[[], object]]) -> None:
        """Has these called from now on. None of them may raise."""
        self._work.extend(work)
        if self._work and not self._due:
            self._due = True
            self._turn()

    def _turn(self) -> None:
        try:
            for _ in range(min(IN_ONE_TURN, len(self._work))):
                self._work.popleft()()
        finally:  # one that raises after all costs nobody else his turn
            if self._work:
                asyncio.get_running_loop().call_soon(self._turn)
            else:
                self._due = False
