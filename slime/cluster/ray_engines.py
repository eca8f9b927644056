"""The engines of a run as actors of Ray: how the supervisor of the fleet starts, watches and ends them.

Consumes: the supervisor's calls, on the driver's thread. Produces: an actor per engine, a new one for each incarnation
on the same slots, and what is wrong with each. Waits for nothing: it asks actors in the background and reads what has
come since (`troubles`, `started`). Is woken by nothing.

Invariants
1. An actor and all below it are dead before another one starts in its place: a server dies with its owner, whatever
   ends that.
2. On GPUs that a trainer lends, an engine that starts again takes memory only while it is lent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from slime.cluster.engine_actor import EngineActor
from slime.cluster.failures import translated
from slime.cluster.placement import EnginePlacement, PlacementPlan
from slime.core.errors import EngineError
from slime.fleet.engine import Engine, State
from slime.serving.server import ServerSpec
from slime.settings import Args
from slime.settings.conditions import lends_at_start

LOOK_EVERY_S = 1.0
"""Between two looks at an engine's processes."""
OWNER_LIMIT_S = 30.0
"""How long the actor that owns an engine may be silent."""
END_LIMIT_S = 5.0
"""How long an actor that is given up may take to end its server in order."""

Options = Callable[[EnginePlacement], dict[str, Any]]
"""Ray's options for the actor of an engine."""


@dataclass(frozen=True, slots=True)
class _Ending:
    """An actor that is being replaced."""

    actor: Any
    stopped: Any
    """Answer to its `stop`."""
    deadline: float
    incarnation: int
    """Of what comes after it."""


class RayEngines:
    """One actor per engine."""

    def __init__(self, args: Args, plan: PlacementPlan, *, log_dir: Path, api_key: str, options: Options) -> None:
        """Creates the first actors, whose servers start at once."""
        self._args, self._plan, self._log_dir, self._api_key = args, plan, log_dir, api_key
        self._options = options
        self.may_take_memory: Callable[[], bool] = lambda: True
        """Whether the trainer lends its memory now; set by who knows."""
        self.dismissed: Callable[[Engine], None] = lambda engine: None
        """Called with an engine that nothing may be sent to; set by who informs router and clients."""
        self._gated = lends_at_start(args)
        self._gates: dict[int, bool] = {}
        """Of engines that start again: whether theirs is open."""
        self._ready: dict[int, Any] = {}
        self._ending: dict[int, _Ending] = {}
        self._looks: dict[int, tuple[Any, float]] = {}
        self._seen_at: dict[int, float] = {}
        self.actors = [self._create(index, 0) for index in range(len(plan.engines))]
        self._watched: dict[int, State] = {}

    def watch(self, engine: Engine) -> None:
        """Looks at an engine from now on, in the state that it is in; at a dead one or one that starts, no more."""
        if engine.answers and engine.state is not State.DEAD:
            self._watched[engine.index] = engine.state
        else:
            self._watched.pop(engine.index, None)
            self._looks.pop(engine.index, None)

    def troubles(self) -> Mapping[int, str]:
        found: dict[int, str] = {}
        for index, state in self._watched.items():
            if problem := self._look(index, state):
                found[index] = problem
        return found

    def start(self, engine: Engine) -> None:
        """Asks the old actor to end in order; `started` goes on when it has, or when it took too long."""
        old = self.actors[engine.index]
        self._ending[engine.index] = _Ending(old, old.stop.remote(), time.monotonic() + END_LIMIT_S, engine.incarnation)

    def started(self, index: int) -> str | None:
        if index in self._ending and not self._replaced(index):
            return None
        if not self._gates.get(index, True):
            self._open_gate(index)
        done, _ = ray.wait([self._ready[index]], timeout=0)
        if not done:
            return None
        try:
            url: str = ray.get(self._ready.pop(index))
        except RayError as error:
            problem = translated(error, f"the start of engine {index}")
            raise problem if isinstance(problem, EngineError) else EngineError(str(problem)) from error
        self._gates.pop(index, None)
        return url

    def dismiss(self, engine: Engine) -> None:
        self.watch(engine.moved(State.DEAD))
        self.dismissed(engine)

    @property
    def takes_memory(self) -> bool:
        """Whether an engine that starts again may be taking memory now."""
        return self._gated and any(self._gates.get(index, True) for index in self._ready)

    def _look(self, index: int, state: State) -> str | None:
        """What the last look said; asks again if it is old."""
        now = time.monotonic()
        asked = self._looks.get(index)
        if asked is None:
            if now - self._seen_at.get(index, 0.0) >= LOOK_EVERY_S:
                self._looks[index] = self.actors[index].problem.remote(state is State.READY), now
            return None
        ref, since = asked
        if not ray.wait([ref], timeout=0)[0]:
            silent_s = now - since
            return f"its owner has not answered for {silent_s:.0f} s" if silent_s > OWNER_LIMIT_S else None
        del self._looks[index]
        self._seen_at[index] = now
        try:
            problem: str | None = ray.get(ref)
        except RayError as error:
            return str(translated(error, f"a look at engine {index}"))
        return problem

    def _open_gate(self, index: int) -> None:
        if self.may_take_memory():
            self.actors[index].open_gate.remote()
            self._gates[index] = True

    def _create(self, index: int, incarnation: int) -> Any:
        placed, args = self._plan.engines[index], self._args
        spec = ServerSpec.from_args(args, index=index, num_threads=placed.num_threads, api_key=self._api_key)
        actor = EngineActor.options(**self._options(placed))  # type: ignore[attr-defined]
        name = str(index) if not incarnation else f"{index}_{incarnation}"
        return actor.remote(name, spec, str(self._log_dir), args, self._plan.address_of(placed.slots[0]))

    def _replaced(self, index: int) -> bool:
        """Whether the old actor is gone, by force if need be, and the new one is being made."""
        ending = self._ending[index]
        if not ray.wait([ending.stopped], timeout=0)[0] and time.monotonic() < ending.deadline:
            return False
        del self._ending[index]
        ray.kill(ending.actor)
        self.actors[index] = self._create(index, ending.incarnation)
        if self._gated:
            self._gates[index] = False
        self._ready[index] = self.actors[index].wait_ready.remote(self._args.engine_start_timeout_s)
        return True
