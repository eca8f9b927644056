"""How the buckets of one training rank travel, each in its turn, while the rank fills the next one.

Consumes: filled buckets (`send`), from the thread that fills them. Produces: engines that have them; for the rank whose
turn is next, the word that it is, and whether all went well. Waits for: the ranks whose turns come before, and engines,
each with a limit. Is woken by: a bucket, then the word of the rank before. Who fills waits for the bucket before the
last one (`wait`), because its memory is filled again.

Engines load one bucket at a time and take part in one broadcast at a time, in the order of the turns: two senders that
reached two engines in different orders would wait for each other.

Invariants
1. Buckets are delivered in the order of all turns, whoever sends them.
2. After a failure nothing more is delivered, on any rank; each rank still fills what it would, because filling is a
   collective of the trainer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from slime.weights.buckets import Bucket
from slime.weights.receivers import Peers
from slime.weights.turns import Turn


class Delivery:
    """One weight sync's buckets of this rank."""

    def __init__(self, turns: Sequence[Turn], peers: Peers, deliver: Callable[[Bucket], None]) -> None:
        """`deliver`: brings a bucket to all engines; raises what went wrong."""
        self._turns, self._peers, self._deliver = turns, peers, deliver
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-send")
        self._running: deque[Future[None]] = deque()
        self._good = True
        self._failure: BaseException | None = None
        self.seconds = 0.0
        """Of delivering."""

    def open(self, good: bool) -> None:
        """The conductor: lets the first turn begin, or says that none may."""
        self._good = good
        if self._peers.conducts and self._turns[0].sender != self._peers.rank:
            self._running.append(self._pool.submit(self._peers.tell, self._turns[0].sender, good))

    def wait(self, most: int) -> None:
        """Waits until at most so many buckets are on their way."""
        while len(self._running) > most:
            self._running.popleft().result()

    def send(self, number: int, bucket: Bucket | None) -> None:
        """Gives the bucket of a turn of this rank away; None: it could not be filled, and nobody may go on."""
        self._running.append(self._pool.submit(self._take_turn, number, bucket))

    def close(self) -> BaseException | None:
        """Waits for all of it. What went wrong in turns of this rank."""
        self.wait(0)
        self._pool.shutdown()
        return self._failure

    def _take_turn(self, number: int, bucket: Bucket | None) -> None:
        rank, before, after = self._peers.rank, number - 1, number + 1
        previous = self._turns[before].sender if before >= 0 else 0
        try:
            if previous != rank:
                self._good = self._peers.hear(previous) and self._good
            if bucket is None:
                self._good = False
            elif self._good:
                began = time.monotonic()
                self._deliver(bucket)
                self.seconds += time.monotonic() - began
        except BaseException as error:
            self._good, self._failure = False, self._failure or error
        try:
            if after < len(self._turns) and self._turns[after].sender != rank:
                self._peers.tell(self._turns[after].sender, self._good)
        except BaseException as error:  # who is next is gone
            self._good, self._failure = False, self._failure or error
