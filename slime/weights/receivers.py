"""Who receives weights, and who sends them: engines behind the control port, and the training ranks as peers.

Control calls to several engines run side by side in threads; each call has its own limit (the control's), and the
first failures are reported together, by engine.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from slime.core.errors import DeadlineExceeded, EngineError, SlimeError
from slime.core.ports import EngineControl

if TYPE_CHECKING:  # transports are imported where torch is not
    from torch import Tensor

T = TypeVar("T")
GRACE_S = 5.0
"""How long engines may take to answer once another one has failed at the same."""
POLL_S = 0.05
"""Between two looks at whether an engine was lost."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """One engine that weights go to."""

    control: EngineControl
    gpu_ids: tuple[str, ...] = ()
    """Per engine rank, stage by stage, the identity of its GPU in the same naming as the trainer's
    (`TransportContext.gpu_id`). Empty on a CPU; only the tensor transport reads it."""
    is_lost: Callable[[], bool] = field(default=lambda: False, compare=False)
    """Whether the supervisor of the fleet has given it up; nothing it answers is worth waiting for then."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The training ranks, as the weight sync sees them. The defaults are a trainer of one rank."""

    rank: int = 0
    """This one. Rank 0 conducts: it pauses engines, verifies and lets them serve."""
    broadcast: Callable[[Any], Any] = lambda value: value
    """Collective: every rank gets the conductor's (picklable) object."""
    gather: Callable[[Any], list[Any] | None] = lambda value: [value]
    """Collective: the conductor gets every rank's (picklable) object in rank order, the others None."""
    share: Callable[[Tensor, int], None] = lambda memory, source: None
    """Collective: the content of one rank's memory in that of all, which are equally large."""
    tell: Callable[[int, bool], None] = lambda turn, good: None
    """Tells the rank whose turn it is that it may begin, and whether all went well so far. From one thread."""
    hear: Callable[[int, int], bool] = lambda turn, num_turns: True
    """Waits for the word of a turn of this rank, behind so many turns of others. From one thread. Raises
    `DeadlineExceeded`."""

    @property
    def conducts(self) -> bool:
        """Whether this rank does what is done once."""
        return self.rank == 0


def on_all(receivers: Sequence[Receiver], call: Callable[[EngineControl], T], what: str) -> list[T]:
    """Calls every engine at the same time and returns their answers in order.

    Raises the one failure as it is, or an `EngineError` that names every engine that failed at `what`; its `engines`
    are those. Once one has failed the others have `GRACE_S` to fail, too, or to answer: without that one they may wait
    for ever. One that was lost is not waited for. Calls that are left go on in threads that nobody waits for.
    """
    futures = {_beside(call, receiver.control): receiver for receiver in receivers}
    failures: dict[str, BaseException] = {}
    pending, deadline = set(futures), math.inf
    while pending and time.monotonic() < deadline:
        done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
        failures |= {futures[f].control.url: error for f in done if (error := f.exception()) is not None}
        lost = [futures[f].control.url for f in pending if futures[f].is_lost()]
        failures |= {url: EngineError(f"engine {url} was lost before it could {what}") for url in lost}
        if lost:
            break
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        in_order = {url: failures[url] for r in receivers if (url := r.control.url) in failures}
        raise _failure(in_order, len(receivers), what)
    return [future.result() for future in futures]


def _failure(failures: Mapping[str, BaseException], num_receivers: int, what: str) -> BaseException:
    """What `on_all` raises."""
    if len(failures) == 1:
        (error,) = failures.values()
    else:
        text = "; ".join(f"{url}: {error}" for url, error in failures.items())
        kind = DeadlineExceeded if all(isinstance(e, DeadlineExceeded) for e in failures.values()) else EngineError
        error = kind(f"{len(failures)} of {num_receivers} engines failed to {what}: {text}")
    if isinstance(error, SlimeError):
        error.engines = tuple(failures)
    return error


def _beside(call: Callable[[EngineControl], T], control: EngineControl) -> Future[T]:
    """Makes a call in a thread of its own, which does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(control))
        except BaseException as error:  # the caller's, whatever it is
            future.set_exception(error)

    threading.Thread(target=run, name=f"weights {control.url}", daemon=True).start()
    return future
