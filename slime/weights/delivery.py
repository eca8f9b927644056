"""Sends the buckets of one training rank, each in its turn, while the rank fills the next one.

Consumes: filled buckets (`send`), from the thread that fills them. Produces: engines that have them, and a word to the
rank whose turn is next: that it may begin, and whether all went well (`Words`). Waits for: the ranks with earlier turns
and for engines, each with a limit. Is woken by: a bucket, then the word of the previous rank. The filling thread waits
for the last bucket but one (`wait`), because it reuses its memory.

Engines load one bucket at a time and take part in one broadcast at a time, in the order of the turns. Two senders that
reached two engines in different orders would deadlock.

Invariants
1. Buckets of all senders are delivered in the order of their turns.
2. After a failure no rank delivers anything more, but each still gives its parts of all tensors, because that is a
   collective of the trainer.
3. A bucket leaves a GPU once it is filled, whatever the trainer does next. On the stream of the filling it would wait
   for the next filling, and so for other ranks that may wait for this bucket: a deadlock. So buckets travel on their
   own stream, each after the event that ended its filling.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from slime.core.errors import DeadlineExceeded
from slime.weights.receivers import Peers
from slime.weights.turns import Bucket, Turn

if TYPE_CHECKING:
    import torch


@functools.cache
def departure_from(device: torch.device) -> Departure:
    """One per process, for all its weight syncs."""
    return Departure(device)


class Departure:
    """The stream on which the buckets of a training rank travel; on a CPU there is none."""

    def __init__(self, device: torch.device) -> None:
        import torch

        # A priority of its own: torch has 32 streams per priority and hands each out several times.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def filled(self) -> torch.cuda.Event | None:
        """The filling thread: an event after all work that the GPU was given so far."""
        import torch

        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

    @contextmanager
    def after(self, filled: torch.cuda.Event | None) -> Iterator[None]:
        """The sending thread: GPU work of the block waits for that event and no other work of the trainer."""
        import torch

        if self._stream is None or filled is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(filled)
            yield


class Delivery:
    """The buckets of this rank in one weight sync. The block joins the thread at its end, but not after an error: that
    ends the run, and the thread may never get what it waits for."""

    def __init__(
        self, turns: Sequence[Turn], peers: Peers, deliver: Callable[[Bucket], None], departure: Departure
    ) -> None:
        """`deliver` brings a bucket to all engines, or raises."""
        self._turns, self._peers, self._deliver, self._departure = turns, peers, deliver, departure
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-send")
        self._running: deque[Future[None]] = deque()
        self._good, self._heard = True, 0
        self.failure: BaseException | None = None
        """The first error in a turn of this rank."""
        self.seconds = 0.0
        """Spent on delivering."""

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=kind is not None)

    def open(self, good: bool) -> None:
        """The conductor: starts the first turn; `good` False: nothing may be sent."""
        self._good = good
        if self._peers.conducts:
            self._running.append(self._pool.submit(self._let_begin, 0))

    def wait(self, most: int) -> None:
        """Waits until at most `most` buckets are on their way."""
        while len(self._running) > most:
            self._running.popleft().result()

    def send(self, number: int, bucket: Bucket | None) -> None:
        """Queues the bucket of a turn of this rank; None: it could not be filled, and nothing more may be sent."""
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
        """Tells the next sender that its turn begins, if it is another rank."""
        try:
            if number < len(self._turns) and self._turns[number].sender != self._peers.rank:
                self._peers.tell(number, self._good)
        except BaseException as error:  # the store is gone
            self._note(error)

    def _note(self, error: BaseException) -> None:
        self._good, self.failure = False, self.failure or error


GOOD, BAD = b"1", b"0"
AT_THE_START = 3
"""Limits of a call before the first turn: pause, flush, join."""
IN_A_TURN = 2
"""Limits of a call in a turn: join, deliver."""


class Words:
    """Tells the next sender that its turn begins and whether all went well so far, through a store.

    With a store instead of messages between two ranks, the teller does not wait, and a listener that gave up leaves
    nothing behind that a later word could collide with. Every rank needs its own client, because a wait blocks it.
    """

    def __init__(self, store: Any, *, limit_s: float) -> None:
        """`store`: a `torch.distributed.Store`. `limit_s`: of each call to engines."""
        self._store, self._limit_s = store, limit_s
        self._number = 0

    def begin(self) -> None:
        """Every rank, at the start of each weight sync. Drops unheard words of the one before."""
        self._number += 1

    def tell(self, turn: int, good: bool) -> None:
        """Starts a turn; `good` False: nothing may be sent in it."""
        self._store.set(self._key(turn), GOOD if good else BAD)

    def hear(self, turn: int, num_turns: int) -> bool:
        """Whether all went well before `turn`, after at most `num_turns` turns of others.

        Raises `DeadlineExceeded`, or `DistNetworkError` if the rank that keeps the store is gone.
        """
        from torch.distributed import DistStoreError

        limit_s = (AT_THE_START + IN_A_TURN * num_turns) * self._limit_s
        key = self._key(turn)
        try:
            self._store.wait([key], timedelta(seconds=limit_s))
        except DistStoreError as error:
            what = f"{num_turns} turns of other training ranks, before turn {turn}"
            raise DeadlineExceeded.waiting(owner="weight sync", for_what=what, limit_s=limit_s) from error
        good = bool(self._store.get(key) == GOOD)
        self._store.delete_key(key)
        return good

    def _key(self, turn: int) -> str:
        return f"{self._number}/{turn}"
