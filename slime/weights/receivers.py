"""The two sides of a weight sync: the engines, reached through their control ports, and the training ranks.

Control calls to several engines run in parallel threads, each with the timeout of its control port. The first failures
are reported together, each with the engine's URL.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from slime.core.engine_interface import EngineControl
from slime.core.errors import DeadlineExceeded, EngineError, SlimeError

if TYPE_CHECKING:  # the command line imports transports without torch
    from torch import Tensor

T = TypeVar("T")
GRACE_S = 5.0
"""How long the other engines have to respond after one has failed."""
POLL_S = 0.05
"""Interval between checks for lost engines."""


@dataclass(frozen=True, slots=True)
class Receiver:
    control: EngineControl
    gpu_ids: tuple[str, ...] = ()
    """GPU of each engine rank, stage by stage, in the format of `TransportContext.gpu_id`. Empty on a CPU. Used only by
    the tensor and mixed transports."""
    is_lost: Callable[[], bool] = field(default=lambda: False, compare=False)
    """Whether the fleet's supervisor has given up on the engine. A weight sync then stops waiting for it."""


@dataclass(frozen=True, slots=True)
class Peers:
    """How this training rank communicates with the others. The defaults are for a single-rank trainer."""

    rank: int = 0
    """This rank. Rank 0 is the conductor: it pauses the engines, verifies their weights and resumes them."""
    broadcast: Callable[[Any], Any] = lambda value: value
    """Collective. Returns the conductor's (picklable) object on every rank."""
    gather: Callable[[Any], list[Any] | None] = lambda value: [value]
    """Collective. Returns all ranks' (picklable) objects in rank order on the conductor, and None on other ranks."""
    share: Callable[[Tensor, int], None] = lambda memory, source: None
    """Collective. Copies a buffer from rank `source` into the other ranks' buffers, which must have the same size."""
    tell: Callable[[int, bool], None] = lambda turn, good: None
    """Notifies the sender of `turn`. `good`: whether all earlier turns succeeded. Called from one thread."""
    hear: Callable[[int, int], bool] = lambda turn, num_turns: True
    """Waits until this rank's `turn` starts, after `num_turns` turns of other ranks. Returns whether all earlier turns
    succeeded. Called from one thread. Raises `DeadlineExceeded`."""

    @property
    def conducts(self) -> bool:
        return self.rank == 0


def on_all(receivers: Sequence[Receiver], call: Callable[[EngineControl], T], what: str) -> list[T]:
    """Calls all engines in parallel and returns their responses in order. `what` describes the call in error messages.

    If one call fails, its error is raised unchanged. Several errors become one `EngineError`, or one `DeadlineExceeded`
    if all of them are timeouts. The message and the attribute `engines` name the failed engines. After a failure, the
    other engines have `GRACE_S` to respond, because they may be waiting for the failed one. If an engine is lost, this
    function raises immediately. Unfinished calls continue in their threads.
    """
    answered: SimpleQueue[int] = SimpleQueue()
    """Numbers of receivers, in the order of their responses. Waiting for all futures at once would take a time that
    grows with their number for each response."""
    futures = [beside(partial(call, one.control), f"weights {one.control.url}") for one in receivers]
    for number, future in enumerate(futures):
        future.add_done_callback(partial(_tell, answered, number))
    failures: dict[str, BaseException] = {}
    pending, deadline, look_at = dict(enumerate(receivers)), math.inf, 0.0
    while pending and (now := time.monotonic()) < deadline:
        with suppress(Empty):
            number = answered.get(timeout=POLL_S)
            error, receiver = futures[number].exception(), pending.pop(number)
            if error is not None:
                failures[receiver.control.url] = error
        if now >= look_at:
            look_at = now + POLL_S
            lost = [one.control.url for one in pending.values() if one.is_lost()]
            failures |= {url: EngineError(f"engine {url} was lost before it could {what}") for url in lost}
            if lost:
                break
        if failures:
            deadline = min(deadline, now + GRACE_S)
    if failures:
        in_order = {url: failures[url] for r in receivers if (url := r.control.url) in failures}
        raise _failure(in_order, len(receivers), what)
    return [future.result() for future in futures]


def _tell(answered: SimpleQueue[int], number: int, _: object) -> None:
    answered.put(number)


def _failure(failures: Mapping[str, BaseException], num_receivers: int, what: str) -> BaseException:
    if len(failures) == 1:
        (error,) = failures.values()
    else:
        text = "; ".join(f"{url}: {error}" for url, error in failures.items())
        kind = DeadlineExceeded if all(isinstance(e, DeadlineExceeded) for e in failures.values()) else EngineError
        error = kind(f"{len(failures)} of {num_receivers} engines failed to {what}: {text}")
    if isinstance(error, SlimeError):
        error.engines = tuple(failures)
    return error


KEEP_S = 10.0
"""How long a thread waits for its next call."""
_calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
"""Calls for idle threads. At most as many as there are idle threads."""
_idle = threading.Semaphore(0)
"""Counts the idle threads that no call has been promised to."""


def beside(call: Callable[[], T], name: str) -> Future[T]:
    """Runs a call in a daemon thread, which has this name meanwhile. Reuses an idle thread if there is one, because
    starting a thread takes longer than most calls.
    """
    future: Future[T] = Future()

    def run() -> None:
        threading.current_thread().name = name
        try:
            future.set_result(call())
        except BaseException as error:  # re-raised in the caller
            future.set_exception(error)

    if _idle.acquire(blocking=False):
        _calls.put(run)
    else:
        threading.Thread(target=_work, args=(run,), name=name, daemon=True).start()
    return future


def _work(run: Callable[[], None]) -> None:
    """Runs this call and those that come within `KEEP_S` after one another."""
    while True:
        run()
        del run  # holds the result
        _idle.release()
        try:
            run = _calls.get(timeout=KEEP_S)
        except Empty:
            if _idle.acquire(blocking=False):
                return
            run = _calls.get()  # a call has just been promised to this thread
