"""Who receives weights, and who sends them: engines behind the control port, and the training ranks as peers.

Control calls to several engines run side by side in threads; each call has its own limit (the control's), and the
first failures are reported together, by engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from slime.core.errors import DeadlineExceeded, EngineError
from slime.core.ports import EngineControl

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Receiver:
    """One engine that weights go to."""

    control: EngineControl
    gpu_ids: tuple[str, ...] = ()
    """Per engine rank, stage by stage, the identity of its GPU in the same naming as the trainer's
    (`TransportContext.gpu_id`). Empty on a CPU; only the tensor transport reads it."""


def _alone(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Peers:
    """The training ranks, as the weight sync sees them. The defaults are a trainer of one rank."""

    is_sender: bool = True
    """Exactly one rank talks to engines."""
    broadcast: Callable[[Any], Any] = _alone
    """Collective: every rank gets the sender's (picklable) object."""
    gather: Callable[[Any], list[Any] | None] = lambda value: [value]
    """Collective: the sender gets every rank's (picklable) object in rank order, the others None."""


def on_all(receivers: Sequence[Receiver], call: Callable[[EngineControl], T], what: str) -> list[T]:
    """Calls every engine at the same time and returns their answers in order.

    Raises the one failure as it is, or an `EngineError` that names every engine that failed at `what`.
    """
    if not receivers:
        return []
    with ThreadPoolExecutor(len(receivers), thread_name_prefix="weights") as pool:
        futures = [pool.submit(call, receiver.control) for receiver in receivers]
        failures = [(r.control.url, f.exception()) for r, f in zip(receivers, futures, strict=True) if f.exception()]
        if len(failures) == 1 and failures[0][1] is not None:
            raise failures[0][1]
        if failures:
            text = "; ".join(f"{url}: {error}" for url, error in failures)
            kind = DeadlineExceeded if all(isinstance(e, DeadlineExceeded) for _, e in failures) else EngineError
            raise kind(f"{len(failures)} of {len(receivers)} engines failed to {what}: {text}")
        return [future.result() for future in futures]
