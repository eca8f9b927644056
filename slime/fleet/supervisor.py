"""The supervisor: finds engines that died or hang, starts them again, and says which of them want weights.

Consumes: what its port finds (`troubles`, `started`), whenever its owner calls `tend`. Produces: changes of the
membership. Waits for nothing; its owner calls it about twice a second, also while it waits for something else itself.

Invariants
1. An engine in trouble gets no more requests before anything else is done about it.
2. One that was started again gets requests only after a weight sync that verified it (`wants_weights`, `synced`).
3. An engine that ends `MAX_FAILURES` times without having been ready in between ends the run: it will not get better.
   One that somebody else starts does not: they may do it right the next time, and others may serve meanwhile.
4. One that ends `MAX_LOSSES` times within `LOSSES_WITHIN_S`, though it served in between, is sick: it is not started
   again, and the run goes on with the others of its kind, or ends if there is none.
5. One whose host is lost is not started before it is there again, and its loss does not count. If all engines of a
   model are lost so or sick, the run ends: nobody would answer for it, however well other models are served.
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

from slime.core.errors import EngineError
from slime.core.ports import WeightVersion
from slime.core.silence import backoff_s
from slime.core.text import shorten
from slime.core.topology import DEFAULT_NAME, ONE_RANK, EngineLayout, Worker

# One inference engine as the fleet knows it: where it is, how wide, what it serves, and in which state it is.
#
#     starting ──► syncing ──► ready
#         ▲           ▲          │
#         │           └──────────┤
#         │        tainted ◄─────┤
#         └───────── dead ◄──────┘
#
# Only a `ready` engine gets requests. Every state but `dead` may become `dead`.

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


# Membership: the one list of engines, with a generation number that grows with every change.
#
# Consumes: changes, by its owner alone, on one thread. Produces: the list as it is now, and calls to those who follow
# it, in the order of their subscription, before `change` returns. Waits for nothing.
#
# Invariants
# 1. Numbers of engines are their places in the list; none is ever taken out.
# 2. The same generation means the same list.

Follower = Callable[[Engine, Engine], None]
"""Called with each change: the engine before it, and after."""


class Membership:
    """All engines of a run."""

    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        self._engines = list(engines)
        assert [e.index for e in self._engines] == list(range(len(self._engines))), "numbers are places"
        self._generation = 0
        self._followers: list[Follower] = []

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All of them, as they are now."""
        return tuple(self._engines)

    @property
    def generation(self) -> int:
        """How many changes there were."""
        return self._generation

    def __getitem__(self, index: int) -> Engine:
        return self._engines[index]

    def of(self, *states: State) -> tuple[Engine, ...]:
        """Those in one of these states."""
        return tuple(engine for engine in self._engines if engine.state in states)

    def follow(self, follower: Follower) -> None:
        """Tells `follower` of every change from now on."""
        self._followers.append(follower)

    def add(self, engine: Engine) -> None:
        """Puts a new engine at the end of the list."""
        assert engine.index == len(self._engines), "numbers are places"
        self._engines.append(engine)
        self._generation += 1

    def change(self, index: int, state: State, **changes: Any) -> Engine:
        """Puts one engine into another state, and returns it so."""
        before = self._engines[index]
        after = self._engines[index] = before.moved(state, **changes)
        self._generation += 1
        for follower in self._followers:
            follower(before, after)
        return after


# What a supervisor asks of the place where engines run. `slime.cluster.ray_engines` is the one on Ray, `external` that
# of engines which somebody else started; tests have one in a process.
#
# No method waits: what takes time goes on in the background, and a later call says how it went.


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


logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""In a row, without having been ready."""
MAX_LOSSES, LOSSES_WITHIN_S = 10, 3600.0
"""Seconds in which it answered: a start may take long, and does not count."""
PAUSE_S = 1.0
"""Between the end of an engine and its next start, doubled with every loss that counts."""
LONGEST_PAUSE_S = 30.0
REASON_CHARS = 400
"""Of what is wrong with an engine, in one line of the log."""


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
        """`restarts`: else an engine in trouble ends the run."""
        self._membership, self._port, self._restarts, self._clock = membership, port, restarts, clock
        self._failures: Counter[int] = Counter()
        self._lives = _Lives()
        self._sick: set[int] = set()
        """Dead ones that are not started again."""
        self._again_at: dict[int, float] = {}
        self._hostless: set[int] = set()
        """Dead ones that wait for their hosts."""
        self._missed: set[int] = set()
        """Those that were lost and do not serve again yet."""

    def tend(self) -> None:
        """Looks once. Raises `EngineError` if an engine cannot be kept alive."""
        for index, reason in self._port.troubles().items():
            if self._membership[index].answers:
                self.lost(self._membership[index], reason)
        for engine in self._membership.of(State.DEAD):
            if self._clock() >= self._again_at[engine.index] and self._can_start(engine):
                again = self._membership.change(engine.index, State.STARTING, incarnation=engine.incarnation + 1)
                logger.info("engine %d is %s", engine.index, "waited for" if engine.external else "started again")
                self._port.start(again)
        for engine, url in self._port.newcomers():
            self._membership.add(engine)
            self.up(engine.index, url)
        for engine in self._membership.of(State.STARTING):
            if engine.incarnation:  # the start of the run waits for the first ones itself
                self._welcome(engine)

    def _can_start(self, engine: Engine) -> bool:
        """Whether its host is there, and it is not sick. Raises `EngineError` if that holds for none of its kind, and
        none lives: half of a pair answers for nobody.
        """
        dead = {e.index for e in self._membership.of(State.DEAD)}
        lost = {index for index in dead - self._sick if not self._port.has_host(index)}
        if not (kind := self._kind_of(engine)) - lost - self._sick:
            sick = len(kind & self._sick)
            ended = f", and {sick} ended too often" * bool(sick)
            raise EngineError(
                f"no engine of model {engine.model} is left: the hosts of {'all ' * (not sick)}{len(kind) - sick} are "
                f"lost{ended}; {engine.reason}"
            )
        for index in lost - self._hostless:
            logger.warning("engine %d waits for its host, which is lost; the run goes on with the others", index)
            self._failures.pop(index, None)
            self._lives.forget(index)
        self._hostless = lost
        return engine.index not in lost | self._sick

    def _kind_of(self, engine: Engine) -> set[int]:
        """Those that can do what this one does, and itself."""
        kind = (engine.model, engine.worker)
        return {e.index for e in self._membership.engines if (e.model, e.worker) == kind}

    def up(self, index: int, url: str) -> None:
        """An engine answers. It wants weights, or has what it serves from its checkpoint."""
        engine = self._membership.change(index, State.SYNCING, url=url)
        self._lives.begin(index, self._clock())
        if engine.role == FROZEN:
            self.synced([engine], 0)

    def wants_weights(self) -> tuple[Engine, ...]:
        """Those that answer and serve no version."""
        return self._membership.of(State.SYNCING, State.TAINTED)

    def syncing(self, engines: Sequence[Engine]) -> None:
        """A weight sync to these begins."""
        for engine in engines:
            if engine.state is not State.SYNCING:
                self._membership.change(engine.index, State.SYNCING)

    def synced(self, engines: Sequence[Engine], version: WeightVersion) -> None:
        """These serve a version; one that died or was replaced meanwhile does not."""
        for engine in engines:
            now = self._membership[engine.index]
            if now.incarnation == engine.incarnation and now.state is State.SYNCING:
                self._membership.change(engine.index, State.READY, version=version)
                self._failures.pop(engine.index, None)
                if engine.index in self._missed:
                    self._missed.remove(engine.index)
                    logger.info("engine %d serves again, at version %d", engine.index, version)

    def tainted(self, engines: Sequence[Engine], reason: str) -> None:
        """A weight sync to these failed."""
        for engine in engines:
            now = self._membership[engine.index]
            if now.incarnation == engine.incarnation and now.state is State.SYNCING:
                self._membership.change(engine.index, State.TAINTED, reason=reason)

    def _welcome(self, engine: Engine) -> None:
        if not self._port.has_host(engine.index):  # it would start for ever
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
        """One that answers, or should have, is given up; it is started again later. Raises `EngineError` if it cannot
        be kept alive. `longest_s`: of the pauses before an engine of somebody else is taken again.
        """
        self._port.dismiss(engine)
        self._membership.change(engine.index, State.DEAD, reason=reason)
        has_host = self._port.has_host(engine.index)
        self._failures[engine.index] += has_host
        self._missed.add(engine.index)
        failures, losses = self._failures[engine.index], self._lives.end(engine.index, self._clock(), counts=has_host)
        if not self._restarts:
            raise EngineError(
                f"engine {engine.index} was lost, and --no-use-fault-tolerance asks to end then: {reason}"
            )
        if failures >= MAX_FAILURES and not engine.external:
            raise EngineError(
                f"engine {engine.index} ended {failures} times without having served in between, so another start "
                f"would not help; the last time: {reason}"
            )
        logger.warning("engine %d was lost: %s", engine.index, shorten(reason, REASON_CHARS))
        if losses >= MAX_LOSSES and not engine.external:
            self._give_up(engine, reason)
        longest_s = longest_s if engine.external else LONGEST_PAUSE_S
        pause_s = backoff_s(max(failures, losses, 1), PAUSE_S, longest_s)
        self._again_at[engine.index] = self._clock() + pause_s

    def _give_up(self, engine: Engine, reason: str) -> None:
        """It is sick. Raises `EngineError` if no other one of its kind is left."""
        self._sick.add(engine.index)
        often = f"engine {engine.index} ended {MAX_LOSSES} times within {LOSSES_WITHIN_S / 3600:.0f} h of serving"
        left = self._kind_of(engine) - self._sick - self._hostless
        if not left:
            raise EngineError(
                f"{often}, so another start would not help, and no other engine of model {engine.model} is left; the "
                f"last time: {reason}"
            )
        self._port.stop([engine.index])
        logger.error("%s: it is not started again, and the run goes on with engines %s", often, sorted(left))


class _Lives:
    """How long engines answered between their losses."""

    def __init__(self) -> None:
        self._lived_s: dict[int, float] = {}
        self._since: dict[int, float] = {}
        self._losses: dict[int, list[float]] = {}
        """Of an engine the seconds that it had answered at each loss that counts."""

    def begin(self, index: int, now: float) -> None:
        """It answers."""
        self._since[index] = now

    def end(self, index: int, now: float, *, counts: bool) -> int:
        """It is lost: the losses that count, within the time, this one among them."""
        lived_s = self._lived_s[index] = self._lived_s.get(index, 0.0) + now - self._since.pop(index, now)
        recent = [at for at in self._losses.get(index, ()) if at > lived_s - LOSSES_WITHIN_S]
        self._losses[index] = [*recent, *[lived_s] * counts]
        return len(self._losses[index])

    def forget(self, index: int) -> None:
        """The losses so far do not count."""
        self._losses.pop(index, None)
