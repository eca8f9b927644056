"""The record of an engine (`Engine`), the list of engines (`Membership`), and the supervisor that keeps them alive.

The diagram shows the states of an engine. Only a `ready` engine gets requests. Any state can change to `dead`.

    starting ──► syncing ──► ready
        ▲           ▲          │
        │           └──────────┤
        │        tainted ◄─────┤
        └───────── dead ◄──────┘

The supervisor finds engines that died or hang, restarts them, and knows which engines need weights. The owner of the
supervisor calls `tend` about twice a second, even while it waits for something else. `tend` polls the port (`troubles`,
`started`) and changes the membership. It never waits. One thread owns the membership and changes it. `change` calls all
followers, in the order of their subscription, before it returns.

Invariants
1. When an engine is in trouble, requests to it are stopped first.
2. A restarted engine gets requests only after a weight sync that verified it (`wants_weights`, `synced`).
3. If an engine fails `MAX_FAILURES` times without being ready in between, the run fails. This does not apply to
   external engines: the owner may repair an engine while others serve.
4. If an engine fails `MAX_LOSSES` times within `LOSSES_WITHIN_S` of serving, it is sick and is not restarted. The run
   continues with other engines of the same kind, or fails if none is left.
5. If a host is lost, its engines wait for it, and these losses do not count. If all engines of a model wait for hosts
   or are sick, the run fails, even if other models are served.
6. The number of an engine is its index in the list. Engines are never removed.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from slime.core.engine_interface import WeightVersion
from slime.core.errors import EngineError
from slime.core.liveness import backoff_s
from slime.core.text import shorten
from slime.core.topology import DEFAULT_NAME, ONE_RANK, EngineLayout, Worker

POLICY, FROZEN = "policy", "frozen"
"""Roles of a model: trained, or with the fixed weights of its checkpoint."""


class State(str, Enum):
    STARTING = "starting"
    """The engine is starting and does not answer yet."""
    SYNCING = "syncing"
    """The engine answers, and waits for weights or receives them."""
    READY = "ready"
    """The engine serves verified weights."""
    TAINTED = "tainted"
    """A weight sync failed midway, so the engine may have weights of two versions and needs a new weight sync."""
    DEAD = "dead"
    """The engine has exited, or does not respond and is being killed."""


NEXT: Mapping[State, frozenset[State]] = {
    State.STARTING: frozenset({State.SYNCING, State.DEAD}),
    State.SYNCING: frozenset({State.READY, State.TAINTED, State.DEAD}),
    State.READY: frozenset({State.SYNCING, State.TAINTED, State.DEAD}),
    State.TAINTED: frozenset({State.SYNCING, State.DEAD}),
    State.DEAD: frozenset({State.STARTING}),
}
"""State -> allowed next states."""

EXPECTS_ANSWERS = (State.READY, State.TAINTED)
"""States in which a silent scheduler counts as hanging. A scheduler that receives weights may be silent for minutes."""


@dataclass(frozen=True, slots=True)
class Engine:
    index: int
    """The engine's number, which does not change when its processes are replaced."""
    slots: tuple[int, ...]
    """Slots of its ranks in the placement plan, stage by stage."""
    layout: EngineLayout = ONE_RANK
    model: str = DEFAULT_NAME
    role: str = POLICY
    """The role of its model. Only a policy gets the trainer's weights."""
    worker: Worker = Worker.REGULAR
    """Regular, or one half of a prefill-decode pair."""
    lends: bool = False
    """Whether it shares GPUs with the trainer and lends it their memory."""
    external: bool = False
    """Whether the engine is external: the run neither starts nor stops its processes."""
    host: str | None = None
    """Address of its host; None if unknown."""
    url: str | None = None
    """None while it does not answer."""
    state: State = State.STARTING
    version: WeightVersion | None = None
    """The version of the weights that the engine serves; None unless it is ready."""
    incarnation: int = 0
    """How often its processes were replaced."""
    reason: str = ""
    """Why it is dead or tainted."""

    def moved(self, state: State, **changes: Any) -> Engine:
        """Returns the record in a different state. Drops version and reason, and the address of a dead engine."""
        assert state in NEXT[self.state], f"engine {self.index} cannot become {state.value} from {self.state.value}"
        forgotten: dict[str, Any] = {"version": None, "reason": ""}
        if state in (State.DEAD, State.STARTING):
            forgotten |= {"url": None}
        return dataclasses.replace(self, **{**forgotten, **changes, "state": state})

    @property
    def answers(self) -> bool:
        return self.url is not None

    def __str__(self) -> str:
        version = f" at version {self.version}" if self.version is not None else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"engine {self.index} is {self.state.value}{version}{reason}"


Follower = Callable[[Engine, Engine], None]
"""(record before a change, record after it) -> None."""


class Membership:
    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        self._engines = list(engines)
        assert [e.index for e in self._engines] == list(range(len(self._engines))), "numbers are places"
        self._followers: list[Follower] = []

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(self._engines)

    def __getitem__(self, index: int) -> Engine:
        return self._engines[index]

    def in_states(self, *states: State) -> tuple[Engine, ...]:
        return tuple(engine for engine in self._engines if engine.state in states)

    def follow(self, follower: Follower) -> None:
        """Calls `follower` after every change from now on."""
        self._followers.append(follower)

    def add(self, engine: Engine) -> None:
        assert engine.index == len(self._engines), "numbers are places"
        self._engines.append(engine)

    def change(self, index: int, state: State, **changes: Any) -> Engine:
        """Changes an engine's state and calls the followers. Returns the new record."""
        before = self._engines[index]
        after = self._engines[index] = before.moved(state, **changes)
        for follower in self._followers:
            follower(before, after)
        return after


class EnginePort(Protocol):
    """Starts, watches and stops the processes of engines. Implemented by `RayEngines` and `ExternalEngines`.

    No method waits. Slow work happens in the background, and a later call reports its result.
    """

    def troubles(self) -> Mapping[int, str]:
        """Returns index -> problem, for all started engines with problems."""
        ...

    def start(self, engine: Engine) -> None:
        """Kills remaining processes of the engine and starts it again."""
        ...

    def started(self, index: int) -> str | None:
        """Returns the address of an engine once it answers, else None. Raises `EngineError` if it exited first."""
        ...

    def stop(self, indices: Sequence[int]) -> Sequence[object]:
        """Tells the processes of these engines to exit. Returns references to their answers."""
        ...

    def newcomers(self) -> Sequence[tuple[Engine, str]]:
        """Returns engines that joined since the last call, with their addresses. They get the next free numbers."""
        ...

    def has_host(self, index: int) -> bool:
        """Returns whether the host of an engine is present, so that a restart can succeed."""
        ...

    def dismiss(self, engine: Engine) -> None:
        """Stops requests to an engine; running requests move to other engines."""
        ...


logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Limit of failures in a row, without being ready in between."""
MAX_LOSSES, LOSSES_WITHIN_S = 10, 3600.0
"""Limit of losses within this time of serving. Startup time does not count."""
PAUSE_S = 1.0
"""Time between the loss of an engine and its restart. It doubles with every loss that counts."""
LONGEST_PAUSE_S = 30.0
REASON_CHARS = 400


class Supervisor:
    """Keeps the engines of a membership alive."""

    def __init__(
        self,
        membership: Membership,
        port: EnginePort,
        *,
        restarts: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """If `restarts` is false, the loss of an engine fails the run."""
        self._membership, self._port, self._restarts, self._clock = membership, port, restarts, clock
        self._failures: Counter[int] = Counter()
        self._lives = _Lives()
        self._sick: set[int] = set()
        """Dead engines that are not restarted."""
        self._again_at: dict[int, float] = {}
        self._hostless: set[int] = set()
        """Dead engines that wait for their hosts."""
        self._missed: set[int] = set()
        """Lost engines that have not served again yet."""

    def tend(self) -> None:
        """Checks all engines once. Raises `EngineError` if an engine cannot be kept alive."""
        for index, reason in self._port.troubles().items():
            if self._membership[index].answers:
                self.lost(self._membership[index], reason)
        for engine in self._membership.in_states(State.DEAD):
            if self._clock() >= self._again_at[engine.index] and self._can_start(engine):
                again = self._membership.change(engine.index, State.STARTING, incarnation=engine.incarnation + 1)
                logger.info("engine %d is %s", engine.index, "waited for" if engine.external else "started again")
                self._port.start(again)
        for engine, url in self._port.newcomers():
            self._membership.add(engine)
            self.up(engine.index, url)
        for engine in self._membership.in_states(State.STARTING):
            if engine.incarnation:  # `slime.cluster.start_actors` waits for the engine's first start
                self._welcome(engine)

    def _can_start(self, engine: Engine) -> bool:
        """Returns whether the engine is not sick and its host is present.

        Raises `EngineError` if no engine of its kind is alive or can start. Then the run must fail even if other kinds
        are left, because half of a prefill-decode pair cannot answer requests.
        """
        dead = {e.index for e in self._membership.in_states(State.DEAD)}
        lost = {index for index in dead - self._sick if not self._port.has_host(index)}
        if not (kind := self._kind_of(engine)) - lost - self._sick:
            sick = len(kind & self._sick)
            ended = f", and {sick} failed too often" * bool(sick)
            raise EngineError(
                f"no engine of model {engine.model} is left: the hosts of {'all ' * (not sick)}{len(kind) - sick} are "
                f"lost{ended}; {engine.reason}"
            )
        for index in lost - self._hostless:
            logger.warning("engine %d waits for its lost host; the run continues with the other engines", index)
            self._failures.pop(index, None)
            self._lives.forget(index)
        self._hostless = lost
        return engine.index not in lost | self._sick

    def _kind_of(self, engine: Engine) -> set[int]:
        """Returns the numbers of all engines of the same model and worker type, including this one."""
        kind = (engine.model, engine.worker)
        return {e.index for e in self._membership.engines if (e.model, e.worker) == kind}

    def up(self, index: int, url: str) -> None:
        """Records that an engine answers. A policy engine then needs weights; a frozen one serves its checkpoint."""
        engine = self._membership.change(index, State.SYNCING, url=url)
        self._lives.begin(index, self._clock())
        if engine.role == FROZEN:
            self.synced([engine], 0)

    def wants_weights(self) -> tuple[Engine, ...]:
        """Returns the engines that answer but need weights."""
        return self._membership.in_states(State.SYNCING, State.TAINTED)

    def syncing(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            if engine.state is not State.SYNCING:
                self._membership.change(engine.index, State.SYNCING)

    def synced(self, engines: Sequence[Engine], version: WeightVersion) -> None:
        """Records that these engines serve `version`. Ignores engines that died or were replaced meanwhile."""
        for engine in engines:
            now = self._membership[engine.index]
            if now.incarnation == engine.incarnation and now.state is State.SYNCING:
                self._membership.change(engine.index, State.READY, version=version)
                self._failures.pop(engine.index, None)
                if engine.index in self._missed:
                    self._missed.remove(engine.index)
                    logger.info("engine %d serves again, at version %d", engine.index, version)

    def tainted(self, engines: Sequence[Engine], reason: str) -> None:
        for engine in engines:
            now = self._membership[engine.index]
            if now.incarnation == engine.incarnation and now.state is State.SYNCING:
                self._membership.change(engine.index, State.TAINTED, reason=reason)

    def _welcome(self, engine: Engine) -> None:
        if not self._port.has_host(engine.index):  # without its host, the engine would never finish starting
            self.lost(engine, "its host was lost while it was starting")
            return
        try:
            url = self._port.started(engine.index)
        except EngineError as error:
            self.lost(engine, str(error))
            return
        if url is not None:
            logger.info("engine %d answers again, at %s", engine.index, url)
            self.up(engine.index, url)

    def lost(self, engine: Engine, reason: str, *, longest_s: float = LONGEST_PAUSE_S) -> None:
        """Marks an engine as dead, to be restarted later. Raises `EngineError` if it cannot be kept alive.

        `longest_s` is the longest pause before an external engine is tried again.
        """
        self._port.dismiss(engine)
        self._membership.change(engine.index, State.DEAD, reason=reason)
        has_host = self._port.has_host(engine.index)
        self._failures[engine.index] += has_host
        self._missed.add(engine.index)
        failures, losses = self._failures[engine.index], self._lives.end(engine.index, self._clock(), counts=has_host)
        if not self._restarts:
            raise EngineError(
                f"engine {engine.index} was lost, which fails a run with --no-use-fault-tolerance: {reason}"
            )
        if failures >= MAX_FAILURES and not engine.external:
            raise EngineError(
                f"engine {engine.index} failed {failures} times without serving in between, so a restart would not "
                f"help. Last reason: {reason}"
            )
        logger.warning("engine %d was lost: %s", engine.index, shorten(reason, REASON_CHARS))
        if losses >= MAX_LOSSES and not engine.external:
            self._give_up(engine, reason)
        longest_s = longest_s if engine.external else LONGEST_PAUSE_S
        pause_s = backoff_s(max(failures, losses, 1), PAUSE_S, longest_s)
        self._again_at[engine.index] = self._clock() + pause_s

    def _give_up(self, engine: Engine, reason: str) -> None:
        """Marks an engine as sick. Raises `EngineError` if no other engine of its kind is left."""
        self._sick.add(engine.index)
        often = f"engine {engine.index} failed {MAX_LOSSES} times within {LOSSES_WITHIN_S / 3600:.0f} h of serving"
        left = self._kind_of(engine) - self._sick - self._hostless
        if not left:
            raise EngineError(
                f"{often}, so a restart would not help, and no other engine of model {engine.model} is left. Last "
                f"reason: {reason}"
            )
        self._port.stop([engine.index])
        logger.error("%s. It is not restarted; the run continues with engines %s", often, sorted(left))


class _Lives:
    """Tracks how long engines served between their losses."""

    def __init__(self) -> None:
        self._lived_s: dict[int, float] = {}
        self._since: dict[int, float] = {}
        self._losses: dict[int, list[float]] = {}
        """Index of an engine -> its total seconds of serving at each loss that counts."""

    def begin(self, index: int, now: float) -> None:
        self._since[index] = now

    def end(self, index: int, now: float, *, counts: bool) -> int:
        """Records a loss. Returns how many losses within `LOSSES_WITHIN_S` count."""
        lived_s = self._lived_s[index] = self._lived_s.get(index, 0.0) + now - self._since.pop(index, now)
        recent = [at for at in self._losses.get(index, ()) if at > lived_s - LOSSES_WITHIN_S]
        self._losses[index] = [*recent, *[lived_s] * counts]
        return len(self._losses[index])

    def forget(self, index: int) -> None:
        self._losses.pop(index, None)
