"""One inference engine as the fleet knows it: where it is, how wide, what it serves, and in which state it is.

    starting ──► syncing ──► ready
        ▲           ▲          │
        │           └──────────┤
        │        tainted ◄─────┤
        └───────── dead ◄──────┘

Only a `ready` engine gets requests. Every state but `dead` may become `dead`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from slime.core.ports import WeightVersion
from slime.core.topology import DEFAULT_NAME, ONE_RANK, EngineLayout, Worker

POLICY, FROZEN = "policy", "frozen"
"""Roles of a model: it is trained, or it stays what its checkpoint has."""


class State(str, Enum):
    """What an engine is good for."""

    STARTING = "starting"
    """Its processes start; nobody can ask it anything."""
    SYNCING = "syncing"
    """It answers, and waits for weights or takes them. It gets no requests."""
    READY = "ready"
    """It serves verified weights."""
    TAINTED = "tainted"
    """A weight sync failed half-way: it holds parts of two versions. It gets no requests until another one succeeds."""
    DEAD = "dead"
    """It has ended, or does not answer; nothing is left of it, or is about to be."""


NEXT: Mapping[State, frozenset[State]] = {
    State.STARTING: frozenset({State.SYNCING, State.DEAD}),
    State.SYNCING: frozenset({State.READY, State.TAINTED, State.DEAD}),
    State.READY: frozenset({State.SYNCING, State.TAINTED, State.DEAD}),
    State.TAINTED: frozenset({State.SYNCING, State.DEAD}),
    State.DEAD: frozenset({State.STARTING}),
}
"""State -> those that may follow it."""

EXPECTS_ANSWERS = (State.READY, State.TAINTED)
"""Those in which a scheduler that is silent hangs. One that takes weights may be busy for minutes."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine of a fleet."""

    index: int
    """Its number, which stays when its processes are replaced."""
    slots: tuple[int, ...]
    """Slots of its ranks in the placement plan, stage by stage."""
    layout: EngineLayout = ONE_RANK
    """How its ranks divide the model."""
    model: str = DEFAULT_NAME
    """Which model of the run it serves."""
    role: str = POLICY
    """What that model is for. Only a policy gets the trainer's weights."""
    worker: Worker = Worker.REGULAR
    """What it does of a request."""
    lends: bool = False
    """Whether its memory goes to a trainer and back: it shares the trainer's GPUs."""
    external: bool = False
    """Whether somebody else starts and ends its processes."""
    host: str | None = None
    """Where it runs; None while that is not known."""
    url: str | None = None
    """Where it answers; None while it does not."""
    state: State = State.STARTING
    version: WeightVersion | None = None
    """Of the weights that it serves; None unless it is ready."""
    incarnation: int = 0
    """How often its processes have been replaced."""
    reason: str = ""
    """Of a dead or tainted one."""

    def moved(self, state: State, **changes: Any) -> Engine:
        """It in another state. What no longer holds is forgotten: the version, and where a dead one answered."""
        assert state in NEXT[self.state], f"engine {self.index} cannot become {state.value} from {self.state.value}"
        forgotten: dict[str, Any] = {"version": None, "reason": ""}
        if state in (State.DEAD, State.STARTING):
            forgotten |= {"url": None}
        return dataclasses.replace(self, **{**forgotten, **changes, "state": state})

    @property
    def answers(self) -> bool:
        """Whether it can be asked, and so can die of its own."""
        return self.url is not None

    def __str__(self) -> str:
        version = f" at version {self.version}" if self.version is not None else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"engine {self.index} is {self.state.value}{version}{reason}"
