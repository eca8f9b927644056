"""What is wrong with a running server, found without disturbing it: its processes, and whether its scheduler answers.

`trouble` looks at the processes at each call: one that ended, or that somebody stopped (SIGSTOP), shows at once. A
thread beside it asks the server for its state in turns (`/server_info`, which the scheduler answers between two batches
of its work, also while it has no memory). A scheduler that is busy answers late, one that hangs never does: what tells
them apart besides is `slime.core.silence`, and whether its clients get tokens (`heard`).

Consumes: the answers of the server, tokens that others have seen, and /proc. Produces: one line of what is wrong. Waits
for: an answer, in its own thread, with a limit; `close` ends it. Is woken by: time, and `close`.

Invariants
1. A server is silent only while `expects_answers` says so: loading weights from disk may take a scheduler minutes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from slime.core.silence import Silence


class ServerWatch:
    """Watches one server from when it answers to its end."""

    def __init__(
        self,
        processes: Callable[[], str | None],
        answers: Callable[[float], bool],
        *,
        interval_s: float,
        timeout_s: float,
        first_wait_s: float = 0.0,
        used_s: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`processes`: what is wrong with them, if anything. `answers`: asks once, with a limit in seconds.

        `interval_s`: between two questions; `timeout_s`: how long a server may be silent; `first_wait_s`: before the
        first question; `used_s`: processor time that its schedulers have used so far, if that is how they compute.
        """
        self._processes, self._answers = processes, answers
        self._interval_s, self._timeout_s, self._first_wait_s = interval_s, timeout_s, first_wait_s
        self._silence = Silence(used_s, begins_in_s=first_wait_s, clock=clock)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="server-watch", daemon=True)
        self._thread.start()

    def trouble(self, *, expects_answers: bool = True) -> str | None:
        """What is wrong now, in one line; None if nothing is known to be."""
        if problem := self._processes():
            return problem
        if not expects_answers:
            self.heard()
        if self._silence.exceeds(self._timeout_s + self._interval_s):
            silent_s = self._silence.lasts_s
            return f"its scheduler has not answered for {silent_s:.0f} s (--rollout-health-check-timeout)"
        return None

    def heard(self) -> None:
        """It lives: it has answered, or somebody else has seen it work."""
        self._silence.heard()

    def close(self) -> None:
        """Ends the questions; one that is under way ends by its own limit."""
        self._closed.set()

    def _ask(self) -> None:
        if self._closed.wait(self._first_wait_s):
            return
        while True:
            if self._answers(self._timeout_s):
                self.heard()
            if self._closed.wait(self._interval_s):
                return
