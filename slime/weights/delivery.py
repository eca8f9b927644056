"""How the buckets of one training rank travel, each in its turn, while the rank fills the next one.

Consumes: filled buckets (`send`), from the thread that fills them. Produces: engines that have them; for the rank whose
turn is next, the word that it is, and whether all went well (`words`). Waits for: the ranks whose turns come before,
and engines, each with a limit. Is woken by: a bucket, then the word of the rank before. Who fills waits for the bucket
before the last one (`wait`), because its memory is filled again.

Engines load one bucket at a time and take part in one broadcast at a time, in the order of the turns: two senders that
reached two engines in different orders would wait for each other.

Invariants
1. Buckets are delivered in the order of all turns, whoever sends them.
2. After a failure nothing more is delivered, on any rank; each rank still gives its parts of all tensors, because that
   is a collective of the trainer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from slime.weights.buckets import Bucket
from slime.weights.departure import Departure
from slime.weights.receivers import Peers
from slime.weights.turns import Turn


class Delivery:
    """One weight sync's buckets of this rank. A context: when it ends, so does the thread; if it ends by an error,
    which ends the run, nobody waits for what the thread waits for."""

    def __init__(
        self, turns: Sequence[Turn], peers: Peers, deliver: Callable[[Bucket], None], departure: Departure
    ) -> None:
        """`deliver`: brings a bucket to all engines; raises what went wrong."""
        self._turns, self._peers, self._deliver, self._departure = turns, peers, deliver, departure
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-send")
        self._running: deque[Future[None]] = deque()
        self._good, self._heard = True, 0
        self.failure: BaseException | None = None
        """What went wrong in turns of this rank."""
        self.seconds = 0.0
        """Of delivering."""

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=kind is not None)

    def open(self, good: bool) -> None:
        """The conductor: lets the first turn begin, or says that none may."""
        self._good = good
        if self._peers.conducts:
            self._running.append(self._pool.submit(self._let_begin, 0))

    def wait(self, most: int) -> None:
        """Waits until at most so many buckets are on their way."""
        while len(self._running) > most:
            self._running.popleft().result()

    def send(self, number: int, bucket: Bucket | None) -> None:
        """Gives the bucket of a turn of this rank away; None: it could not be filled, and nobody may go on."""
        self._running.append(self._pool.submit(self._take_turn, number, bucket, self._departure.filled()))

    def _take_turn(self, number: int, bucket: Bucket | None, filled: Any) -> None:
        try:
            if (self._turns[number - 1].sender if number else 0) != self._peers.rank:
                self._good = self._peers.hear(number, number - self._heard) and self._good
            if bucket is None:
                self._good = False
            elif self._good:
                began = time.monotonic()
                with self._departure.after(filled):
                    self._deliver(bucket)
                self.seconds += time.monotonic() - began
        except BaseException as error:
            self._note(error)
        self._heard = number + 1
        self._let_begin(number + 1)

    def _let_begin(self, number: int) -> None:
        """Tells the rank whose turn is next, if that is another one."""
        try:
            if number < len(self._turns) and self._turns[number].sender != self._peers.rank:
                self._peers.tell(number, self._good)
        except BaseException as error:  # the store is gone
            self._note(error)

    def _note(self, error: BaseException) -> None:
        self._good, self.failure = False, self.failure or error
