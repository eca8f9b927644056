"""Work in slices: the event loop does some of it in each turn, so that others get their turn.

A thousand tasks that are woken at once all run in one turn, and nothing else runs until the last of them has. `Slices`
makes many small calls, some in each turn: it consumes callables and waits for nothing. `Budget` lets tasks through as
far as the work of a turn goes: a task waits in `take`, and is woken in its order by a later turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

IN_ONE_TURN = 64
"""Calls of `Slices`."""


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


class Budget:
    """Work that the tasks of an event loop may do in one of its turns."""

    def __init__(self, most: int) -> None:
        """`most`: of the unit that `take` counts; a task that wants more than that has a turn for itself."""
        self._most, self._used = most, 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._due = False

    async def take(self, amount: int) -> None:
        """Returns in a turn that has room for so much; those who asked before go first."""
        if self._waiting or self._used >= self._most:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append((waiter, amount))
            await waiter
        else:
            self._spend(amount)

    def _spend(self, amount: int) -> None:
        self._used += amount
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._due, self._used = False, 0
        while self._waiting and self._used < self._most:
            waiter, amount = self._waiting.popleft()
            if not waiter.done():  # nobody waits for one that was cancelled
                waiter.set_result(None)
                self._spend(amount)
