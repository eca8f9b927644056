"""Saving in the background: one thread writes and commits a checkpoint while training goes on.

Consumes a function that writes: the driver starts it when every rank has copied what it will write. Produces what the
save reports of itself, or its error. A thread of its own does the writing; the driver looks at it after each step, or
waits for it with a limit, and is then woken by its end. Nobody else is.

Invariants
1. At most one save is under way: `start` asks for `finish` of the one before.
2. An error in the background is raised by the next `poll` or `finish`, once, and never lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait

from slime.core.errors import SAVE_FLAG, DeadlineExceeded

Facts = Mapping[str, float]
"""What a save reports of itself, as metrics."""


class BackgroundSave:
    """The save under way, if any."""

    def __init__(self) -> None:
        self._future: Future[Facts] | None = None
        self._what = ""

    def start(self, write: Callable[[], Facts], *, what: str) -> None:
        """Runs `write` in a thread that does not keep the process alive; `what` names it in errors."""
        assert self._future is None, f"{self._what} is still under way; finish it first"
        future: Future[Facts] = Future()

        def run() -> None:
            try:
                future.set_result(write())
            except BaseException as error:  # raised for whoever asks
                future.set_exception(error)

        self._future, self._what = future, what
        threading.Thread(target=run, name=what, daemon=True).start()

    def poll(self) -> Facts:
        """What a save that has ended reports; nothing if none has. Raises its error."""
        return self.finish(limit_s=0) if self._future is not None and self._future.done() else {}

    def finish(self, *, limit_s: float) -> Facts:
        """Waits for the save under way, if any. Raises its error, or `DeadlineExceeded`."""
        if self._future is None:
            return {}
        done, _ = wait([self._future], timeout=limit_s)
        if not done:
            raise DeadlineExceeded.waiting(owner="driver", for_what=self._what, limit_s=limit_s, flag=SAVE_FLAG)
        future, self._future = self._future, None
        return future.result()
