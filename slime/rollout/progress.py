"""`Heartbeat`: when user code last made progress, so that its limit counts the time without any.

    from slime.rollout.progress import alive
    alive()        # in a generate function, now and then, while it waits long for something of its own

Tasks, and threads that slime starts, inherit it through `HEARTBEAT`. Consumes: `beat` of whoever sees progress, and
`waiting` of what waits under a limit of its own: the engine client, the teacher's, graders, sandboxes. Produces: the
time without progress, which `supervise` reads. Waits for nothing. Times are those of the event loop.

Invariants
1. While a block of `waiting` runs, no time counts; when it ends there was progress.
2. Progress of an execution is progress of whatever it is part of.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar


class Heartbeat:
    """Of one supervised call."""

    __slots__ = ("_at", "_loop", "_num_waiting", "_parent", "num_beats", "threads")

    def __init__(self, loop: asyncio.AbstractEventLoop, parent: Heartbeat | None = None) -> None:
        """`parent`: of what the call is part of."""
        self._loop, self._parent = loop, parent
        self._at, self._num_waiting = loop.time(), 0
        self.num_beats = 0
        """Signs of progress."""
        self.threads: set[int] = set()
        """Identities of the threads that run for it now."""

    def beat(self) -> None:
        """There is progress. From any thread."""
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._beat()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._beat)

    def silent_s(self) -> float:
        """Seconds without progress."""
        return 0.0 if self._num_waiting else self._loop.time() - self._at

    def _beat(self) -> None:
        self._at, self.num_beats = self._loop.time(), self.num_beats + 1
        if self._parent is not None:
            self._parent._beat()

    def _waits(self, num: int) -> None:
        self._num_waiting += num
        if self._parent is not None:
            self._parent._waits(num)


HEARTBEAT: ContextVar[Heartbeat | None] = ContextVar("slime_heartbeat", default=None)


def alive() -> None:
    """Says that the function that calls it makes progress (`--execution-timeout-s`). Without effect elsewhere."""
    beat = HEARTBEAT.get()
    if beat is not None:
        beat.beat()


class Waiting:
    """What a block of `waiting` may say."""

    __slots__ = ("_beat",)

    def __init__(self, beat: Heartbeat | None) -> None:
        self._beat = beat

    @contextlib.contextmanager
    def handing_out(self) -> Iterator[None]:
        """The block is again the user's time: a part of what is waited for is in his hands."""
        if self._beat is None:
            yield
            return
        self._beat._waits(-1)
        self._beat._beat()
        try:
            yield
        finally:
            self._beat._waits(1)


@contextlib.contextmanager
def waiting() -> Iterator[Waiting]:
    """The block waits under a limit of its own, on the event loop: its time does not count."""
    beat = HEARTBEAT.get()
    if beat is None:
        yield Waiting(None)
        return
    beat._waits(1)
    try:
        yield Waiting(beat)
    finally:
        beat._waits(-1)
        beat._beat()
