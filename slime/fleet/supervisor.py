"""Engine records (`Engine`), the list of engines (`Membership`), the supervisor that keeps engines running, and the
files through which a user drains engines (`FleetFiles`).

Engine states (only `ready` engines receive requests, and any state can change to `dead`):

    starting ──► syncing ──► ready
        ▲           ▲          │
        │           └──────────┤
        │        tainted ◄─────┤
        └───────── dead ◄──────┘

The supervisor detects dead and hung engines, restarts them, and tracks which engines need weights. Its owner calls
`tend` about twice a second, even while waiting for something else. `tend` polls the port (`troubles`, `started`) and
updates the membership without blocking. The membership is only used from one thread. `change` calls all followers, in
the order of subscription, before it returns.

Invariants
1. When an engine has a problem, requests to it are stopped before anything else is done.
2. A restarted engine only receives requests after a verified weight sync (`wants_weights`, `synced`).
3. If an engine fails `MAX_FAILURES` times without becoming ready in between, the run fails. External engines are
   exempt, because their owner may repair them while others serve.
4. If an engine fails `MAX_LOSSES` times within `LOSSES_WITHIN_S` of serving, it is marked as sick and not restarted.
   The run continues with other engines of the same kind, or fails if there are none.
5. If a host is lost, its engines wait for it, and these losses do not count. If all engines of a model are sick or
   waiting for hosts, the run fails, even if other models are still served.
6. An engine's number is its index in the list. Engines are never removed.
7. A drained engine (`slime fleet RUN drain`) is dead until it is taken back. The last engine of a kind is not drained.
8. The run does not fail because of an engine that is not vital (`--eval-fleet`). Such an engine is marked as sick where
   a vital one would end the run.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from slime.core.engine_interface import WeightVersion
from slime.core.errors import DataError, EngineError
from slime.core.files import replace_text
from slime.core.liveness import backoff_s
from slime.core.text import shorten
from slime.core.topology import DEFAULT_NAME, ONE_RANK, EngineLayout, Worker

DRAINED = "drained by command"
"""Reason of an engine that `slime fleet` has taken out of service."""
POLICY, FROZEN, EVALUATION = "policy", "frozen", "evaluation"
"""Roles of a model: trained, frozen at its checkpoint's weights, or trained but only for evaluations."""


class State(str, Enum):
    STARTING = "starting"
    """The engine is starting and does not respond yet."""
    SYNCING = "syncing"
    """The engine responds and is waiting for or receiving weights."""
    READY = "ready"
    """The engine serves verified weights."""
    TAINTED = "tainted"
    """A weight sync failed midway, so the engine may have mixed weights and needs another sync."""
    DEAD = "dead"
    """The engine has exited or is unresponsive and being killed."""


NEXT: Mapping[State, frozenset[State]] = {
    State.STARTING: frozenset({State.SYNCING, State.DEAD}),
    State.SYNCING: frozenset({State.READY, State.TAINTED, State.DEAD}),
    State.READY: frozenset({State.SYNCING, State.TAINTED, State.DEAD}),
    State.TAINTED: frozenset({State.SYNCING, State.DEAD}),
    State.DEAD: frozenset({State.STARTING}),
}
"""State -> allowed next states."""

Kind = tuple[str, Worker]
"""Model and worker type: engines of one kind can replace each other."""
EXPECTS_ANSWERS = (State.READY, State.TAINTED)
"""States in which an unresponsive scheduler counts as hung. Receiving weights can make it unresponsive for minutes."""


@dataclass(frozen=True, slots=True)
class Engine:
    index: int
    """The engine's number, which stays the same when its processes are replaced."""
    slots: tuple[int, ...]
    """The ranks' slots in the placement plan, stage by stage."""
    layout: EngineLayout = ONE_RANK
    model: str = DEFAULT_NAME
    role: str = POLICY
    """Role of the model. Policy engines receive the trainer's weights, those for evaluations only before each one."""
    worker: Worker = Worker.REGULAR
    """Regular, or one half of a prefill-decode pair."""
    lends: bool = False
    """Whether the engine shares GPUs with the trainer and frees their memory for it."""
    external: bool = False
    """Whether the engine is external, that is, neither started nor stopped by the run."""
    host: str | None = None
    """Address of the engine's host, or None if unknown."""
    url: str | None = None
    """Address of the engine; None while it does not respond."""
    state: State = State.STARTING
    version: WeightVersion | None = None
    """Weight version that the engine serves. None unless it is ready."""
    incarnation: int = 0
    """Number of times the engine's processes were replaced."""
    reason: str = ""
    """Why the engine is dead or tainted."""

    def moved(self, state: State, **changes: Any) -> Engine:
        """Returns the record in a new state. Resets version and reason, and the URL of a dead or starting engine."""
        assert state in NEXT[self.state], f"engine {self.index} cannot become {state.value} from {self.state.value}"
        forgotten: dict[str, Any] = {"version": None, "reason": ""}
        if state in (State.DEAD, State.STARTING):
            forgotten |= {"url": None}
        return dataclasses.replace(self, **{**forgotten, **changes, "state": state})

    @property
    def answers(self) -> bool:
        return self.url is not None

    @property
    def kind(self) -> Kind:
        return self.model, self.worker

    def __str__(self) -> str:
        version = f" at version {self.version}" if self.version is not None else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"engine {self.index} is {self.state.value}{version}{reason}"


Follower = Callable[[Engine, Engine], None]
"""Called with the record before and after a change."""


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
        """Subscribes `follower` to all future changes."""
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
    """Starts, watches and stops engine processes. Implemented by `RayEngines` and `ExternalEngines`.

    Methods do not block. Slow work happens in the background, and a later call reports its result.
    """

    def troubles(self) -> Mapping[int, str]:
        """Returns index -> problem for all started engines with problems."""
        ...

    def start(self, engine: Engine) -> None:
        """Kills the engine's remaining processes and restarts it."""
        ...

    def started(self, index: int) -> str | None:
        """Returns the engine's address once it responds, or None until then. Raises `EngineError` if it exits first."""
        ...

    def stop(self, indices: Sequence[int]) -> Sequence[object]:
        """Tells the processes of these engines to exit. Returns object refs of the calls."""
        ...

    def newcomers(self) -> Sequence[tuple[Engine, str]]:
        """Returns the engines that joined since the last call, numbered consecutively, with their addresses."""
        ...

    def has_host(self, index: int) -> bool:
        """Returns whether an engine's host is present, so that a restart can succeed."""
        ...

    def dismiss(self, engine: Engine) -> None:
        """Stops requests to an engine. Running requests move to other engines."""
        ...


logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Maximum number of consecutive failures without becoming ready in between."""
MAX_LOSSES, LOSSES_WITHIN_S = 10, 3600.0
"""Maximum number of losses within this much serving time. Startup time does not count."""
PAUSE_S = 1.0
"""Initial delay before a lost engine is restarted. Doubles with every loss that counts."""
LONGEST_PAUSE_S = 30.0
REASON_CHARS = 400


class Supervisor:
    """Keeps a membership's engines running."""

    def __init__(
        self,
        membership: Membership,
        port: EnginePort,
        *,
        restarts: bool = True,
        vital: Callable[[Engine], bool] = lambda engine: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`restarts`: if False, losing an engine fails the run. `vital`: whether the run needs this engine."""
        self._membership, self._port, self._restarts, self._clock = membership, port, restarts, clock
        self._vital = vital
        self._failures: Counter[int] = Counter()
        self._lives = _Lives()
        self._sick: set[int] = set()
        """Dead engines that will not be restarted."""
        self._again_at: dict[int, float] = {}
        self._hostless: set[int] = set()
        """Dead engines that are waiting for their hosts."""
        self._missed: set[int] = set()
        """Lost engines that have not served again yet."""
        self._drained: set[int] = set()
        """Dead engines that stay dead until `take_back`."""

    @property
    def drained(self) -> frozenset[int]:
        """The numbers of drained engines."""
        return frozenset(self._drained)

    def drain(self, index: int) -> str:
        """Stops an engine until `take_back`; its requests move to other engines. Returns why it was not, or "".

        An engine in a weight sync is not drained yet (""); call this again later.
        """
        engine = self._membership[index]
        if index in self._drained or engine.state is State.SYNCING:
            return ""
        if self._vital(engine):
            others = self._kind_of(engine) - self._gone - {index}
            serving = [e for e in self._membership.in_states(State.READY, State.SYNCING) if e.index in others]
            if not others or (engine.state is State.READY and not serving):
                what = "ready yet" if others else "left"
                return f"engine {index} is not drained, because no other engine of model {engine.model} is {what}"
        if engine.state is not State.DEAD:
            self._port.dismiss(engine)
            self._membership.change(index, State.DEAD, reason=DRAINED)
            self._lives.end(index, self._clock(), counts=False)
        self._drained.add(index)
        self._missed.add(index)
        self._again_at[index] = self._clock()
        self._port.stop([index])
        logger.info("engine %d is drained", index)
        return ""

    def take_back(self, index: int) -> None:
        """Restarts a drained engine, which serves after a verified weight sync."""
        self._drained.discard(index)

    def tend(self) -> None:
        """Checks all engines once. Raises `EngineError` if an engine cannot be kept running."""
        for index, reason in self._port.troubles().items():
            if self._membership[index].answers:
                self.lost(self._membership[index], reason)
        dead = self._membership.in_states(State.DEAD)
        if due := [e for e in dead if e.index not in self._drained and self._clock() >= self._again_at[e.index]]:
            self._note_hosts()
            away = self._hostless | self._sick | self._drained
            living = {e.kind for e in self._membership.engines if e.index not in away}
        for engine in due:
            if self._can_start(engine, living):
                again = self._membership.change(engine.index, State.STARTING, incarnation=engine.incarnation + 1)
                logger.info(
                    "engine %d is %s", engine.index, "expected to return" if engine.external else "being restarted"
                )
                self._port.start(again)
        for engine, url in self._port.newcomers():
            self._membership.add(engine)
            self.up(engine.index, url)
        for engine in self._membership.in_states(State.STARTING):
            if engine.incarnation:  # `slime.cluster.start_actors` waits for the engine's first start
                self._welcome(engine)

    def _note_hosts(self) -> None:
        """Notes which dead engines have lost their hosts."""
        dead = {e.index for e in self._membership.in_states(State.DEAD)}
        lost = {index for index in dead - self._sick if not self._port.has_host(index)}
        for index in lost - self._hostless:
            logger.warning("engine %d waits for its lost host; the run continues with the other engines", index)
            self._failures.pop(index, None)
            self._lives.forget(index)
        self._hostless = lost

    def _can_start(self, engine: Engine, living: Container[Kind]) -> bool:
        """Returns whether the engine is not sick and its host is present. `living`: the kinds with an engine that is
        running or can be started.

        Raises `EngineError` if the engine's kind is not among them. The run must then fail even if other kinds are
        left, because half of a prefill-decode pair cannot serve requests.
        """
        if engine.kind not in living and self._vital(engine):
            kind = self._kind_of(engine)
            away = {
                "without a host": self._hostless - self._drained,
                "failed too often": self._sick,
                "drained": self._drained - self._sick,
            }
            counts = ", ".join(f"{len(kind & some)} {how}" for how, some in away.items() if kind & some)
            raise EngineError(f"no engine of model {engine.model} is left ({counts}); {engine.reason}")
        return engine.index not in self._hostless | self._sick

    @property
    def _gone(self) -> set[int]:
        """The engines that do not return by themselves."""
        return self._sick | self._hostless | self._drained

    def _kind_of(self, engine: Engine) -> set[int]:
        """Returns the numbers of all engines with the same model and worker type, including this one."""
        return {e.index for e in self._membership.engines if e.kind == engine.kind}

    def up(self, index: int, url: str) -> None:
        """Records that an engine responds. A policy engine now needs weights; a frozen one serves its checkpoint."""
        engine = self._membership.change(index, State.SYNCING, url=url)
        self._lives.begin(index, self._clock())
        if engine.role == FROZEN:
            self.synced([engine], 0)

    def wants_weights(self) -> tuple[Engine, ...]:
        """Returns the engines that respond but need weights."""
        return self._membership.in_states(State.SYNCING, State.TAINTED)

    def expects(self, role: str) -> bool:
        """Returns whether an engine of this role is starting or will be restarted."""
        for engine in self._membership.in_states(State.STARTING, State.DEAD):
            if engine.role == role and engine.index not in self._gone:
                return True
        return False

    def syncing(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            if engine.state is not State.SYNCING:
                self._membership.change(engine.index, State.SYNCING)

    def synced(self, engines: Sequence[Engine], version: WeightVersion) -> None:
        """Records that these engines serve `version`. Ignores engines that have since died or been replaced."""
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
        if not self._port.has_host(engine.index):  # without its host, the engine would never start
            self.lost(engine, "its host was lost while it was starting")
            return
        try:
            url = self._port.started(engine.index)
        except EngineError as error:
            self.lost(engine, str(error))
            return
        if url is not None:
            logger.info("engine %d responds again at %s", engine.index, url)
            self.up(engine.index, url)

    def lost(self, engine: Engine, reason: str, *, longest_s: float = LONGEST_PAUSE_S) -> None:
        """Marks an engine as dead and schedules its restart. Raises `EngineError` if it cannot be kept running.

        `longest_s`: maximum delay before an external engine is retried.
        """
        self._port.dismiss(engine)
        self._membership.change(engine.index, State.DEAD, reason=reason)
        has_host = self._port.has_host(engine.index)
        self._failures[engine.index] += has_host
        self._missed.add(engine.index)
        failures, losses = self._failures[engine.index], self._lives.end(engine.index, self._clock(), counts=has_host)
        if fatal := self._fatal(engine, failures, reason):
            if self._vital(engine):
                raise EngineError(fatal)
            logger.error("%s; the run continues without it", shorten(fatal, REASON_CHARS))
            self._sick.add(engine.index)
            self._port.stop([engine.index])
        else:
            logger.warning("engine %d was lost: %s", engine.index, shorten(reason, REASON_CHARS))
        if not fatal and losses >= MAX_LOSSES and not engine.external:
            self._give_up(engine, reason)
        longest_s = longest_s if engine.external else LONGEST_PAUSE_S
        pause_s = backoff_s(max(failures, losses, 1), PAUSE_S, longest_s)
        self._again_at[engine.index] = self._clock() + pause_s

    def _fatal(self, engine: Engine, failures: int, reason: str) -> str:
        """Returns why a lost engine is not restarted, or "" if it is. `failures`: those in a row."""
        if not self._restarts:
            return f"engine {engine.index} was lost, and --no-use-fault-tolerance forbids restarting it: {reason}"
        if failures < MAX_FAILURES or engine.external:
            return ""
        return (
            f"engine {engine.index} failed {failures} times in a row without serving, so another restart would not "
            f"help. Last reason: {reason}"
        )

    def _give_up(self, engine: Engine, reason: str) -> None:
        """Marks an engine as sick. Raises `EngineError` if it is vital and no other engine of its kind is left."""
        self._sick.add(engine.index)
        often = f"engine {engine.index} failed {MAX_LOSSES} times within {LOSSES_WITHIN_S / 3600:.0f} h of serving"
        left = self._kind_of(engine) - self._gone
        if not left and self._vital(engine):
            raise EngineError(
                f"{often}, so another restart would not help, and no other engine of model {engine.model} is left. "
                f"Last reason: {reason}"
            )
        self._port.stop([engine.index])
        logger.error(
            "%s, so it is not restarted; the run continues with engines %s", often, sorted(left) or "of other models"
        )


class _Lives:
    """Tracks how long engines served between their losses."""

    def __init__(self) -> None:
        self._lived_s: dict[int, float] = {}
        self._since: dict[int, float] = {}
        self._losses: dict[int, list[float]] = {}
        """Engine index -> its accumulated serving time at each loss that counts, in seconds."""

    def begin(self, index: int, now: float) -> None:
        self._since[index] = now

    def end(self, index: int, now: float, *, counts: bool) -> int:
        """Records a loss. Returns the number of losses within `LOSSES_WITHIN_S` that count."""
        lived_s = self._lived_s[index] = self._lived_s.get(index, 0.0) + now - self._since.pop(index, now)
        recent = [at for at in self._losses.get(index, ()) if at > lived_s - LOSSES_WITHIN_S]
        self._losses[index] = [*recent, *[lived_s] * counts]
        return len(self._losses[index])

    def forget(self, index: int) -> None:
        self._losses.pop(index, None)


FLEET, ORDERS = "fleet.json", "fleet_orders.json"


def is_named(names: Container[str], index: int, host: str | None) -> bool:
    """Returns whether an engine is among these numbers of engines and addresses of hosts."""
    return str(index) in names or (bool(host) and host in names)


class FleetFiles:
    """Two files in the run folder, for `slime fleet`.

    The run writes its engines to `fleet.json`. The command writes the engines (numbers) and hosts (addresses) that
    should be drained to `fleet_orders.json`.
    """

    def __init__(self, folder: Path) -> None:
        self._fleet, self._orders = folder / FLEET, folder / ORDERS
        self._written = ""
        self._read: tuple[int, frozenset[str]] = (0, frozenset())
        """Change time of the orders when they were last read, and what they were."""

    def begin(self) -> None:
        """Removes the files of an earlier launch, whose engines ran elsewhere."""
        self.end()
        self._orders.unlink(missing_ok=True)

    def end(self) -> None:
        self._fleet.unlink(missing_ok=True)

    def write(self, engines: Sequence[Engine], drained: Iterable[int], refused: Mapping[int, str]) -> None:
        """Writes the engines, if something changed. `refused`: index -> why an engine that should be drained is not."""
        away = frozenset(drained)
        told = [
            {
                "engine": engine.index,
                "model": engine.model,
                "host": engine.host,
                "url": engine.url,
                "state": "drained" if engine.index in away else engine.state.value,
                "version": engine.version,
                "reason": refused.get(engine.index, engine.reason),
                "refuses": engine.index in refused,
            }
            for engine in engines
        ]
        if (text := json.dumps(told, indent=1)) != self._written:
            replace_text(self._fleet, text + "\n", durable=False)
            self._written = text

    def engines(self) -> list[dict[str, Any]]:
        """Reads what `write` wrote. Raises `DataError` if the run is not running, or has no engines of its own yet."""
        try:
            found: list[dict[str, Any]] = json.loads(self._fleet.read_text())
        except FileNotFoundError:
            raise DataError(f"{self._fleet.parent} has no {FLEET}: the run has ended or has no engines yet") from None
        return found

    def drained(self) -> frozenset[str]:
        """Returns the numbers and addresses to drain. If the file cannot be read, the last known ones."""
        try:
            changed = self._orders.stat().st_mtime_ns
            if changed != self._read[0]:
                self._read = (changed, frozenset(map(str, json.loads(self._orders.read_text())["drained"])))
        except FileNotFoundError:
            self._read = (0, frozenset())
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("cannot read %s: %s", self._orders, error)
        return self._read[1]

    def order(self, drained: Iterable[str]) -> None:
        """Writes the numbers and addresses to drain."""
        replace_text(self._orders, json.dumps({"drained": sorted(drained)}) + "\n", durable=False)
