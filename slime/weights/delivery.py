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

# When a bucket may leave a GPU: once it is filled, whatever the trainer asks of the GPU next.
#
# Kernels of one stream run one after the other. A bucket that travels on the stream on which the next one is filled
# would wait for that, and with it for other ranks, which may wait for the bucket: nobody would ever go on. So buckets
# travel on a stream of their own, each behind the event that ended its filling.


@functools.cache
def departure_from(device: torch.device) -> Departure:
    """One for all weight syncs of a process."""
    return Departure(device)


class Departure:
    """Of the buckets of one training rank."""

    def __init__(self, device: torch.device) -> None:
        """On a CPU, what is asked for is done at once, and there is nothing to wait for."""
        import torch

        # Of another priority than all else: of equal ones torch has 32, and hands them out again and again.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def filled(self) -> torch.cuda.Event | None:
        """Who fills: all that was asked of the GPU so far."""
        import torch

        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

    @contextmanager
    def after(self, filled: torch.cuda.Event | None) -> Iterator[None]:
        """Who sends: what is asked of the GPU in here waits for that event, and for nothing else of the trainer."""
        import torch

        if self._stream is None or filled is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(filled)
            yield


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


# The word from one training rank to the next that it is its turn, and whether all went well so far: through a store.
#
# Consumes and produces: a word for each turn of a weight sync. Waits for: who tells it, with a limit for each turn in
# between. Is woken by: the word.
#
# A store, and not messages between two ranks: who waits no longer leaves nothing behind that a later word could run
# into, and who tells waits for nobody.

GOOD, BAD = b"1", b"0"
AT_THE_START = 3
"""Limits for what the conductor does before the first turn: pause, flush, join."""
IN_A_TURN = 2
"""Limits for a turn: join, deliver."""


class Words:
    """One rank's ear and mouth. Every rank has its own client of the store, since one that waits keeps its client."""

    def __init__(self, store: Any, *, limit_s: float) -> None:
        """`store`: of torch (`torch.distributed.Store`). `limit_s`: of each call to engines."""
        self._store, self._limit_s = store, limit_s
        self._number = 0

    def begin(self) -> None:
        """Every rank, at the start of each weight sync: what was not heard of the one before is never heard."""
        self._number += 1

    def tell(self, turn: int, good: bool) -> None:
        """Lets a turn begin, or says that nothing may be sent in it."""
        self._store.set(self._key(turn), GOOD if good else BAD)

    def hear(self, turn: int, num_turns: int) -> bool:
        """Whether all went well before `turn`, behind at most `num_turns` turns of others.

        Raises `DeadlineExceeded`, or what the store raises if the rank that keeps it is gone (`DistNetworkError`).
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
