"""What the weight sync asks of a transport.

Every trainer rank has its own transport object and calls it for every bucket in the same order. `prepare` may be a
collective among trainer ranks and must not raise (it returns what went wrong, so that the collectives of the ranks
stay matched); `deliver` and the rest run on the sender alone and may raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from slime.weights.buckets import Bucket
from slime.weights.targets import EngineTarget


class Transport(Protocol):
    """One way of sending."""

    name: str
    """As in `--update-weight-transport`."""

    def begin(self, targets: Sequence[EngineTarget], *, version: int) -> None:
        """Sender: connects to engines that are new to it. Engines are paused and drained."""
        ...

    def prepare(self, bucket: Bucket, targets: Sequence[EngineTarget]) -> Any:
        """Every rank: makes the bucket ready to travel. Returns an exception instead of raising one."""
        ...

    def deliver(self, prepared: Any, targets: Sequence[EngineTarget], *, version: int) -> None:
        """Sender: hands it to all engines and returns once they have it."""
        ...

    def finish(self, targets: Sequence[EngineTarget], *, version: int) -> None:
        """Sender: after the last bucket."""
        ...

    def abandon(self) -> None:
        """Every rank: the weight sync failed; forget half-sent state, so that another one can start afresh."""
        ...

    def settle(self) -> None:
        """Every rank: all engines have everything; frees what was kept for them."""
        ...

    def close(self) -> None:
        """Every rank: the run ends."""
        ...
