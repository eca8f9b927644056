"""What a supervisor asks of the place where engines run. `slime.cluster.ray_engines` is the one on Ray, `external` that
of engines which somebody else started; tests have one in a process.

No method waits: what takes time goes on in the background, and a later call says how it went.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slime.fleet.engine import Engine


class EnginePort(Protocol):
    """Starts, watches and ends the processes of engines."""

    def troubles(self) -> Mapping[int, str]:
        """Engine -> what is wrong with it, of all that were started and of which something was found wrong so far."""
        ...

    def start(self, engine: Engine) -> None:
        """Ends what may be left of this engine and starts it again, under the incarnation that it says."""
        ...

    def started(self, index: int) -> str | None:
        """Where an engine answers, once it does. Raises `EngineError` if it ended before."""
        ...

    def stop(self, indices: Sequence[int]) -> Sequence[object]:
        """Asks what runs of these engines to end. Answers may come later."""
        ...

    def newcomers(self) -> Sequence[tuple[Engine, str]]:
        """Engines that have joined since the last call, each with where it answers, under the next numbers."""
        ...

    def has_host(self, index: int) -> bool:
        """Whether the host of an engine is there, so that another start can succeed."""
        ...

    def dismiss(self, engine: Engine) -> None:
        """Nothing is sent there any more, and what runs there goes elsewhere."""
        ...
