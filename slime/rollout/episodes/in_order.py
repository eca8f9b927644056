"""`InOrder`: calls of a worker begin in the order of their numbers, in whatever order they come.

A process that runs many calls side by side gets them as they arrive, and the later of two may be the first: `resume`
before `pause`, `cancel` before the `run` that it is about.

Consumes: numbered calls. Produces: their answers. A call waits until those before it have begun, and is woken by the
last of them; one that never comes is an error of those behind it, after a limit. All on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from slime.core.errors import DeadlineExceeded

TURN_LIMIT_S = 120.0
"""How much later than another one a call may come that was made before it."""


class InOrder:
    """Calls methods of an object."""

    def __init__(self, called: Any) -> None:
        self._called = called
        self._next = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def call(self, number: int, method: str, *arguments: Any) -> Any:
        """The answer of `method`, which begins after the calls of all smaller numbers. Raises what it raises, and
        `DeadlineExceeded` if one of those does not come.
        """
        await self._turn(number, method)
        try:
            answer = getattr(self._called, method)(*arguments)
        finally:
            self._next += 1
            if (following := self._waiting.get(self._next)) is not None and not following.done():
                following.set_result(None)
        # It begins here, in this turn of the event loop: as a task of its own it would begin behind a call that comes
        # in the same turn.
        return await answer if isinstance(answer, Awaitable) else answer

    async def _turn(self, number: int, method: str) -> None:
        if number == self._next:
            return
        turn = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(TURN_LIMIT_S):
                await turn
        except TimeoutError:
            raise DeadlineExceeded.waiting(
                owner=f"call {number} of a rollout worker ({method})",
                for_what=f"call {self._next}, which was made before it",
                limit_s=TURN_LIMIT_S,
            ) from None
        finally:
            del self._waiting[number]
