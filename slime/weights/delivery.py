"""Sends the buckets of one training rank, each in its turn (`send_plan.Turn`), while the rank fills the next one.

Consumes: filled buckets (`send`), from the thread that fills them. Produces: engines that have these buckets, and a
message to the sender of the next turn (`SenderMessages`). Waits for: the ranks with earlier turns and the engines, each
with a limit. Woken by: a bucket, then the message of the previous sender. The filling thread waits until the
second-to-last bucket has been sent (`wait`), because the next bucket reuses that memory.

Engines load one bucket at a time and take part in one broadcast at a time, in the order of the turns. If two senders
reached two engines in different orders, they would deadlock.

Invariants
1. Buckets of all senders are delivered in the order of their turns.
2. After a failure no rank delivers any further bucket, but every rank still contributes its shards of all tensors,
   because the other ranks wait for them in a collective.
3. A bucket leaves the GPU once it is filled, without waiting for later work of the trainer. On the stream that fills
   buckets, the send would queue behind the next fill, and so behind other ranks that may be waiting for this bucket: a
   deadlock. So buckets are sent on their own stream, each after the event that marks the end of its fill.
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
from slime.weights.send_plan import Bucket, Turn

if TYPE_CHECKING:
    import torch


@functools.cache
def send_stream(device: torch.device) -> SendStream:
    """Returns the `SendStream` that all weight syncs of this process share."""
    return SendStream(device)


class SendStream:
    """The CUDA stream that sends the buckets of a training rank. Does nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        import torch

        # torch has 32 streams per priority and returns each one several times. A separate priority keeps this stream
        # unshared.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def filled(self) -> torch.cuda.Event | None:
        """Records an event after all GPU work queued so far. Called by the filling thread."""
        import torch

        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

    @contextmanager
    def after(self, filled: torch.cuda.Event | None) -> Iterator[None]:
        """Makes GPU work in the block wait for `filled`, and for nothing else. Called by the sending thread."""
        import torch

        if self._stream is None or filled is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(filled)
            yield


class Delivery:
    """Sends the buckets of this rank in one weight sync. Leaving the `with` block joins the thread, except after an
    error: an error ends the run, and the thread may wait forever."""

    def __init__(
        self, turns: Sequence[Turn], peers: Peers, deliver: Callable[[Bucket], None], stream: SendStream
    ) -> None:
        """`deliver` sends a bucket to all engines, or raises."""
        self._turns, self._peers, self._deliver, self._stream = turns, peers, deliver, stream
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-send")
        self._running: deque[Future[None]] = deque()
        self._good, self._heard = True, 0
        self.failure: BaseException | None = None
        """The first error in this rank's turns."""
        self.seconds = 0.0
        """Time spent in `deliver`."""

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=kind is not None)

    def open(self, good: bool) -> None:
        """Starts the first turn, on the conductor. If `good` is False, no rank may send."""
        self._good = good
        if self._peers.conducts:
            self._running.append(self._pool.submit(self._let_begin, 0))

    def wait(self, most: int) -> None:
        """Waits until at most `most` buckets are in flight."""
        while len(self._running) > most:
            self._running.popleft().result()

    def send(self, number: int, bucket: Bucket | None) -> None:
        """Queues the bucket for turn `number`. `bucket` is None if filling failed; then no rank sends any more."""
        self._running.append(self._pool.submit(self._take_turn, number, bucket, self._stream.filled()))

    def _take_turn(self, number: int, bucket: Bucket | None, filled: Any) -> None:
        try:
            if (self._turns[number - 1].sender if number else 0) != self._peers.rank:
                self._good = self._peers.hear(number, number - self._heard) and self._good
            if bucket is None:
                self._good = False
            elif self._good:
                began = time.monotonic()
                with self._stream.after(filled):
                    self._deliver(bucket)
                self.seconds += time.monotonic() - began
        except BaseException as error:
            self._note(error)
        self._heard = number + 1
        self._let_begin(number + 1)

    def _let_begin(self, number: int) -> None:
        """Tells the sender of turn `number` to begin, unless this rank is the sender."""
        try:
            if number < len(self._turns) and self._turns[number].sender != self._peers.rank:
                self._peers.tell(number, self._good)
        except BaseException as error:  # the store is lost
            self._note(error)

    def _note(self, error: BaseException) -> None:
        self._good, self.failure = False, self.failure or error


GOOD, BAD = b"1", b"0"
AT_THE_START = 3
"""Number of engine calls before the first turn: pause, flush, join. Each takes at most `limit_s`."""
IN_A_TURN = 2
"""Number of engine calls in a turn: join, deliver."""


class SenderMessages:
    """Messages between senders, through a store: a turn may begin, and whether all earlier turns succeeded.

    Unlike with point-to-point messages, `tell` does not block, and a rank that gave up in `hear` leaves nothing behind
    that could disturb later messages. Every rank needs its own store client, because a wait blocks the client.
    """

    def __init__(self, store: Any, *, limit_s: float) -> None:
        """`store`: a `torch.distributed.Store`. `limit_s`: time limit for each call to an engine."""
        self._store, self._limit_s = store, limit_s
        self._number = 0

    def begin(self) -> None:
        """Starts a weight sync and drops unread messages of the previous one. Every rank calls it."""
        self._number += 1

    def tell(self, turn: int, good: bool) -> None:
        """Starts a turn. If `good` is False, the sender of the turn must not send."""
        self._store.set(self._key(turn), GOOD if good else BAD)

    def hear(self, turn: int, num_turns: int) -> bool:
        """Waits until `turn` may begin, for at most the time of `num_turns` turns. Returns whether all earlier turns
        succeeded.

        Raises `DeadlineExceeded`, or `DistNetworkError` if the rank with the store is gone.
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
