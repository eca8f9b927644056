"""The guardian of a host on which the driver does not run, and the handle of the actor that owns it.

It is the same process as the driver's guardian, with the actor in the driver's place. Ray ends the actor when the
driver is gone, so this is how a host hears of it:

    killed              who notices                       what follows on this host
    the driver          Ray, which ends its actors        end-of-file on the pipe: the guardian ends the run
    this host's raylet  its workers, the actor too        the same
    Ray's head          the raylets, after their limit    the same
    the actor           the guardian, by its pipe         the same; the driver hears of it and starts another actor,
                                                          which waits until that guardian has done (`guarded_hosts`)
    the guardian        the actor, by the other pipe      it starts another one, in a tenth of a second; an actor that
                                                          is killed in that time leaves none, until the driver's next
    the guardian, for   the driver: `wait` returns        another actor with another guardian
    the fourth time

Consumes the guardian's words. Produces a guardian as long as this process lives, and at `close` an empty host. Waits,
with limits, for guardians of the run here whose owners are gone before it starts its own, and in `close` for the
guardian's last word. One thread waits for the guardian's next word and is woken by it, or by its end.

Invariants
1. The guardian has no pipe but the two of this process, so its end-of-file is this process's end.
2. `close` ends the guardian that watches, and none starts after it.
3. No guardian that ends what is left of the run here is there when a new one starts to watch: it would end new things.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from slime.cluster.guardian import Watcher, ending_guardians, start_watcher
from slime.core.blame import here
from slime.core.errors import DeadlineExceeded, EngineError

MAX_STARTS = 4
CLOSE_LIMIT_S = 15.0
OLD_LIMIT_S = 60.0
"""How long a guardian whose owner is gone may take: ten seconds and its looks, on a busy machine."""
POLL_S = 0.1
logger = logging.getLogger(__name__)


class HostGuardian:
    """Keeps a guardian on this host."""

    def __init__(self, run_id: str, *, log_path: Path) -> None:
        """Raises `EngineError` if none starts, `DeadlineExceeded` if one of another owner does not end."""
        _wait_for_old(run_id)
        self._run_id, self._log_path = run_id, log_path
        self._lock, self._closing, self._over = threading.Lock(), False, threading.Event()
        self._num_left: int | None = None
        self._watcher = self._start()
        self._thread = threading.Thread(target=self._listen, name="guardian", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when no guardian watches any more, and this one starts no other."""
        self._over.wait()

    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Ends the run's processes on this host, this one spared, and waits until none is left.

        Raises `EngineError` if some are left, `DeadlineExceeded` if the guardian does not answer.
        """
        with self._lock:  # never the pipe of a guardian that is just being replaced
            self._closing = True
            self._watcher.end()
        if not self._over.wait(limit_s):
            raise DeadlineExceeded.waiting(
                owner="a host's actor", for_what=f"{here('the guardian')} (log: {self._log_path})", limit_s=limit_s
            )
        if self._num_left != 0:
            guardian = here("the guardian", self._log_path)
            if self._num_left is None:
                raise EngineError(f"{guardian.ended(None)}; nobody has looked what is left of the run there")
            raise EngineError(f"{guardian} left {self._num_left} processes; its log {self._log_path} names them")

    def _start(self) -> Watcher:
        return start_watcher(self._run_id, [], self._log_path)

    def _listen(self) -> None:
        for start in range(1, MAX_STARTS + 1):
            self._num_left = self._watcher.last_word()
            with self._lock:
                if self._num_left is not None or self._closing or start == MAX_STARTS:
                    break
                logger.warning("the guardian of this host was killed; another one starts")
                try:
                    self._watcher = self._start()
                except (OSError, EngineError):
                    logger.exception("no other guardian started")
                    break
        self._over.set()


def _wait_for_old(run_id: str) -> None:
    """Until every guardian of the run here has an owner."""
    deadline = time.monotonic() + OLD_LIMIT_S
    while old := ending_guardians(run_id):
        if time.monotonic() > deadline:
            raise DeadlineExceeded.waiting(
                owner="a host's actor",
                for_what=f"{here('the guardian')} of the one before it to end",
                limit_s=OLD_LIMIT_S,
                last_progress=f"it lives, as process {old[0]}",
            )
        time.sleep(POLL_S)
