"""Why a worker has no answer for a group, as `fleet` tells its own functions. Nobody else sees these."""

from __future__ import annotations

from slime.core.errors import ActorDied, WorkerStalled


class WorkerLost(Exception):
    """The worker of a group died."""

    def __init__(self, death: ActorDied) -> None:
        super().__init__(str(death))
        self.is_stall = isinstance(death, WorkerStalled)


class Guilty(Exception):
    """A group ended the processes that worked on it."""


class Ended(Exception):
    """The run ended the requests of a group that was between two workers."""
