"""Sends one training rank's buckets in turn order (`send_plan.Turn`) while the rank fills the next bucket.

The filling thread queues each bucket with `send`. A background thread waits for the previous sender's message, delivers
the bucket to all engines, and notifies the sender of the next turn (`SenderMessages`). Every wait has a timeout. Before
it fills a bucket, the filling thread waits (`wait`) until the second-to-last bucket has been sent, because the next
bucket reuses that memory.

An engine loads one bucket and joins one broadcast at a time. If two senders reached two engines in different orders,
they would deadlock, so all sends follow the turn order.

Invariants
1. Buckets from all senders are delivered in turn order.
2. After a failure, no rank delivers another bucket. Every rank still contributes its shards of all tensors, because
   other ranks wait for them in a collective.
3. A bucket is sent as soon as it is filled and does not wait for later GPU work. If the send used the fill stream, it
   would queue behind the next fill. That fill may wait for ranks that in turn wait for this bucket, which is a
   deadlock. So a separate stream sends each bucket after the event that marks the end of its fill.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from slime.core.errors import DeadlineExceeded
from slime.weights.receivers import Peers
from slime.weights.send_plan import Bucket, Turn

if TYPE_CHECKING:
    import torch


@functools.cache
def send_stream(device: torch.device) -> SendStream:
    """Returns the `SendStream` shared by all weight syncs in this process."""
    return SendStream(device)


class SendStream:
    """The CUDA stream on which a training rank sends its buckets. A no-op on CPU."""

    def __init__(self, device: torch.device) -> None:
        import torch

        # torch hands out the same 32 streams per priority in rotation. With its own priority, this stream is not
        # shared.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def filled(self) -> torch.cuda.Event | None:
        """Records an event after all GPU work queued so far. Called from the filling thread."""
        import torch

        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

    def sent(self) -> torch.cuda.Event | None:
        """Records an event after all sends queued so far. Called from the sending thread."""
        return None if self._stream is None else self._stream.record_event()

    def reuse(self, sent: torch.cuda.Event | None) -> None:
        """Makes the fill stream wait until a bucket has been sent. Called from the filling thread."""
        import torch

        if self._stream is not None and sent is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(sent)

    @contextmanager
    def after(self, filled: torch.cuda.Event | None) -> Iterator[None]:
        """Runs the block's GPU work on the send stream after `filled`. Called from the sending thread."""
        import torch

        if self._stream is None or filled is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(filled)
            yield


class Delivery:
    """Sends this rank's buckets during one weight sync. Exiting the `with` block joins the thread unless an exception
    was raised: the run then ends, and the thread might never return."""

    def __init__(
        self,
        turns: Sequence[Turn],
        peers: Peers,
        deliver: Callable[[Bucket, Sequence[Turn]], None],
        stream: SendStream,
    ) -> None:
        """`deliver` sends a bucket to all engines or raises. Its second argument contains this turn and all turns that
        follow before another rank sends; it is empty if an earlier call has announced this turn.
        """
        self._turns, self._peers, self._deliver, self._stream = turns, peers, deliver, stream
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-send")
        self._running: deque[Future[torch.cuda.Event | None]] = deque()
        self._queued: deque[Bucket | None] = deque()
        """Apart from the futures, because the thread keeps the arguments of a call for a moment after its result is
        there: memory that the filling thread frees and allocates again would exist twice."""
        self._good, self._heard = True, 0
        self.failure: BaseException | None = None
        """The first error in any of this rank's turns."""
        self._began: float | None = None
        self.seconds = 0.0
        """Time from the start of the first bucket to the end of the last one."""

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=kind is not None)

    def open(self, good: bool) -> None:
        """Starts the first turn (conductor only). If `good` is False, no rank sends."""
        self._good = good
        if self._peers.conducts:
            self._running.append(self._pool.submit(self._let_begin, 0))

    def wait(self, most: int) -> None:
        """Waits until at most `most` buckets are in flight. GPU work queued afterwards may overwrite the others."""
        while len(self._running) > most:
            self._stream.reuse(self._running.popleft().result())

    def send(self, number: int, bucket: Bucket | None) -> None:
        """Queues a bucket for turn `number`. None: filling failed, so no rank may send anything more."""
        self._queued.append(bucket)
        self._running.append(self._pool.submit(self._take_turn, number, self._stream.filled()))

    def _take_turn(self, number: int, filled: Any) -> torch.cuda.Event | None:
        bucket, sent = self._queued.popleft(), None
        try:
            if (self._turns[number - 1].sender if number else 0) != self._peers.rank:
                self._good = self._peers.hear(number, number - self._heard) and self._good
            if bucket is None:
                self._good = False
            elif self._good:
                self._began = self._began or time.monotonic()
                with self._stream.after(filled):
                    self._deliver(bucket, self._stretch(number))
                    sent = self._stream.sent()
                self.seconds = time.monotonic() - self._began
        except BaseException as error:
            self._note(error)
        self._heard = number + 1
        self._let_begin(number + 1)
        return sent

    def _stretch(self, number: int) -> Sequence[Turn]:
        """Returns this rank's consecutive turns from turn `number` on, or () if it also has the turn before."""
        rank = self._peers.rank
        if number and self._turns[number - 1].sender == rank:
            return ()
        return tuple(itertools.takewhile(lambda turn: turn.sender == rank, self._turns[number:]))

    def _let_begin(self, number: int) -> None:
        """Notifies the sender of turn `number`, unless this rank is the sender."""
        try:
            if number < len(self._turns) and self._turns[number].sender != self._peers.rank:
                self._peers.tell(number, self._good)
        except BaseException as error:  # the store is gone
            self._note(error)

    def _note(self, error: BaseException) -> None:
        self._good, self.failure = False, self.failure or error


GOOD, BAD = b"1", b"0"
AT_THE_START = 3
"""Number of engine calls before the first turn (pause, flush, join). Each takes at most `limit_s`."""
IN_A_TURN = 2
"""Number of engine calls per turn (join, deliver)."""


class SenderMessages:
    """Messages between senders through a store. Each starts a turn and says whether all earlier turns succeeded.

    Unlike point-to-point communication, `tell` never blocks, and a rank that times out in `hear` leaves no pending
    receive behind. Every rank needs its own store client, because a wait blocks the client.
    """

    def __init__(self, store: Any, *, limit_s: float) -> None:
        """`store`: a `torch.distributed.Store`; `limit_s`: timeout of each engine call."""
        self._store, self._limit_s = store, limit_s
        self._number = 0

    def begin(self) -> None:
        """Starts a weight sync and discards unread messages from the previous one. Called on every rank."""
        self._number += 1

    def tell(self, turn: int, good: bool) -> None:
        """Starts a turn. `good=False` tells the sender whose turn it is not to send anything."""
        self._store.set(self._key(turn), GOOD if good else BAD)

    def hear(self, turn: int, num_turns: int) -> bool:
        """Waits for `turn` to start and returns whether all earlier turns succeeded. The timeout allows for `num_turns`
        earlier turns.

        Raises `DeadlineExceeded` on timeout, or `DistNetworkError` if the rank that hosts the store is gone.
        """
        from torch.distributed import DistStoreError

        limit_s = (AT_THE_START + IN_A_TURN * num_turns) * self._limit_s
        key = self._key(turn)
        try:
            self._store.wait([key], timedelta(seconds=limit_s))
        except DistStoreError as error:
            what = f"other training ranks to send {num_turns} buckets before bucket {turn}"
            raise DeadlineExceeded.waiting(owner="weight sync", for_what=what, limit_s=limit_s) from error
        good = bool(self._store.get(key) == GOOD)
        self._store.delete_key(key)
        return good

    def _key(self, turn: int) -> str:
        return f"{self._number}/{turn}"
