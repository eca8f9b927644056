"""One weight sync as the driver runs it: all that new weights mean to trainer, engines and running requests, in order.

    1. memory     the trainer keeps its weights alone, engines take room for theirs `MemoryHandOver`
    2. requests   those that run end, if this weight sync ends them                `EndRequests`
    3. weights    training ranks send, engines are verified and serve              `RankWeightSync`
    4. requests   go on
    5. memory     the trainer gives those away, engines take room for the cache    `MemoryHandOver`
    6. traffic    the first time: the router takes the engines

Consumes the trainer's weights. Produces engines that serve them, and the metrics of the transfer. Runs on the driver's
thread; waits for training ranks, engines and the rollout side, each with a limit; nobody wakes it.

Invariants
1. The router knows no engine that has not been verified.
2. After an error the sequence stops: requests that were ended stay so, engines stay paused, and the run ends.
"""

from __future__ import annotations

import enum
from typing import assert_never

from slime.cluster.actors import Actors
from slime.cluster.memory import MemoryHandOver
from slime.observability.spans import span
from slime.observability.tracker import Tracker
from slime.settings import Args

REQUESTS_LIMIT_S = 60.0
"""Limit of ending requests, and of letting them go on."""


class EndRequests(enum.Enum):
    """Which weight syncs end the requests that run; those are sent again with the tokens that they have."""

    NEVER = enum.auto()
    """None run: generation and weight sync take turns."""
    FOR_SAVES = enum.auto()
    """Those that a save follows, which writes the tokens down. Through all others engines keep their requests."""
    ALWAYS = enum.auto()
    """Every one. An engine that had to end requests itself would take a second to see that they have ended."""

    @classmethod
    def of(cls, args: Args) -> EndRequests:
        """Only the worker of `--fully-async` generates during a weight sync."""
        if not args.fully_async:
            return cls.NEVER
        match args.pause_generation_mode:
            case "abort":
                return cls.ALWAYS
            case "retract" | "in_place":
                return cls.FOR_SAVES
            case _ as never:
                assert_never(never)


class WeightSyncSequence:
    """The weight syncs of a run."""

    def __init__(self, args: Args, actors: Actors, *, memory: MemoryHandOver, tracker: Tracker) -> None:
        self._actors, self._memory, self._tracker = actors, memory, tracker
        self._ends_requests = EndRequests.of(args)
        self._saves = args.save is not None
        self._admit_limit_s = args.engine_start_timeout_s
        self._admitted = False

    def run(self, *, for_save: bool) -> None:
        """Sends the trainer's weights to every engine and verifies what the engines hold; then they serve.

        `for_save`: a checkpoint follows. Without a trainer (--debug-rollout-only) the engines serve what they loaded,
        as version 0; without engines nothing happens. Raises `WeightSyncError`, `EngineError` or `DeadlineExceeded`.
        """
        if not self._actors.engine_infos:
            return
        self._memory.room_for_weights()
        with span("update_weights"):
            self._send(self._ends(for_save=for_save and self._saves))
        self._memory.room_for_the_rest()
        self._admit()

    def _ends(self, *, for_save: bool) -> bool:
        """Whether this weight sync ends the requests that run."""
        return self._ends_requests is EndRequests.ALWAYS or (self._ends_requests is EndRequests.FOR_SAVES and for_save)

    def _send(self, ends_requests: bool) -> None:
        """Steps 2 to 4."""
        if ends_requests:
            self._actors.on_rollout("pause", for_what="requests to end", limit_s=REQUESTS_LIMIT_S)
        metrics = self._actors.on_trainers("sync_weights")
        if ends_requests:
            self._actors.on_rollout("resume", for_what="requests to go on", limit_s=REQUESTS_LIMIT_S)
        if metrics:
            self._tracker.add(metrics[0])

    def _admit(self) -> None:
        """Lets the router send requests to the engines, once."""
        if self._admitted:
            return
        urls = [info.url for info in self._actors.engine_infos]
        self._actors.on_rollout("admit", urls, for_what="the router to take the engines", limit_s=self._admit_limit_s)
        self._admitted = True
