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
1. The guardian is not a child of this process: Ray ends the children of an actor with it.
2. It has no pipe but the two of this process, so its end-of-file is this process's end.
3. `close` ends the guardian that watches, and none starts after it.
4. No guardian that ends what is left of the run here is there when a new one starts to watch: it would end new things.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from pathlib import Path

from slime.cluster.guardian import ENDED, WATCHING, ending_guardians, start_guardian_process
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
        self._process = self._start()
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
            assert self._process.stdin is not None, "the guardian was started without a pipe"
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if not self._over.wait(limit_s):
            raise DeadlineExceeded.waiting(owner="a host's actor", for_what="its guardian", limit_s=limit_s)
        if self._num_left != 0:
            raise EngineError(
                f"got {'no word' if self._num_left is None else f'{self._num_left} processes left'} from the guardian "
                f"at its end; {self._log_path} names what it found"
            )

    def _start(self) -> subprocess.Popen[bytes]:
        process = start_guardian_process(self._run_id, [], self._log_path, detached=True)
        assert process.stdout is not None, "the guardian was started without a pipe for its words"
        if process.stdout.readline() != WATCHING:
            raise EngineError(f"the guardian ended with status {process.wait()} instead of watching; {self._log_path}")
        process.wait()  # the one that detached it
        return process

    def _listen(self) -> None:
        for start in range(1, MAX_STARTS + 1):
            assert self._process.stdout is not None, "the guardian was started without a pipe for its words"
            word = self._process.stdout.readline()
            if word.startswith(ENDED):
                self._num_left = int(word.removeprefix(ENDED))
            with self._lock:
                if word or self._closing or start == MAX_STARTS:
                    break
                logger.warning("the guardian of this host was killed; another one starts")
                try:
                    self._process = self._start()
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
                for_what="the guardian of the one before it to end",
                limit_s=OLD_LIMIT_S,
                last_progress=f"it is pid {old[0]}",
            )
        time.sleep(POLL_S)
