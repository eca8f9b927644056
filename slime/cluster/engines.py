"""The engines of a run, as the driver deals with them: who serves, who wants weights, who sends requests.

Membership, its supervisor and the actors behind them, together with those who follow: the router and the clients (on
the rollout side) send requests to engines that are ready and to no other; calls go to those that answer; the weight
sync takes those that answer, and the driver's waits call `tend`, which looks after the guardians of the hosts, too.

Consumes: calls of the driver's thread. Produces: engines that serve. Waits for: calls to actors, with a limit, and for
one engine to answer where there is none. Is woken by nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

from slime.cluster.hosts import GuardedHosts
from slime.cluster.waiting import all_there, peek, wait_for
from slime.core.errors import START_FLAG, DeadlineExceeded, EngineError, SlimeError
from slime.core.ports import WeightVersion
from slime.core.silence import WORKING, Silence, load
from slime.core.topology import EngineLayout
from slime.fleet.supervisor import FROZEN, POLICY, Engine, EnginePort, Membership, State, Supervisor
from slime.settings import Args

# The actors of a run as the driver calls them: every call waits for all of them, with a name and a limit.

WEIGHT_VERSION = "perf/weight_version"
"""Metric of a weight sync: the version that engines serve after it."""
TRAINERS_LIMIT_S = 24 * 3600.0
"""Limit of one call to the training ranks, a training step or what takes as long: far above any sane one. What they
wait for in it, each other or an engine, has a limit of its own (--distributed-timeout-minutes,
--weight-sync-timeout-s)."""
MEMORY_LIMIT_S = 3600.0
"""Limit of one that moves memory of a GPU."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the weight sync needs to know of an engine."""

    index: int
    url: str
    layout: EngineLayout
    """How its ranks divide the model."""
    slots: tuple[int, ...]
    """Placement slots of its ranks, stage by stage; a training rank on the same slot can share memory with it."""
    control_key: str | None = field(default=None, repr=False)
    """What its control routes ask for."""
    incarnation: int = 0
    """How often its processes have been replaced: another one may answer at the same address."""


@dataclass(frozen=True, slots=True)
class Actors:
    """Handles of every actor. Those of Ray are not typed."""

    trainers: tuple[Any, ...]
    """By rank (`TrainActor`); none with --debug-rollout-only."""
    engines: Engines
    """All of them, whatever becomes of each; none with --debug-train-only."""
    rollout: Any
    """The one `RolloutActor`."""

    def on_trainers(
        self,
        method: str,
        *arguments: Any,
        limit_s: float = TRAINERS_LIMIT_S,
        flag: str = "",
        on_poll: Callable[[], str] | None = None,
    ) -> list[Any]:
        """Calls a method of every training rank; their answers in rank order. `flag`: raises the limit."""
        refs = [getattr(trainer, method).remote(*arguments) for trainer in self.trainers]
        what = f"{method} on {len(refs)} training ranks"
        return wait_for(refs, for_what=what, limit_s=limit_s, on_poll=on_poll, flag=flag)

    def give_up(self, engine: EngineInfo) -> None:
        """Tells the training ranks, of which several send, that an engine is lost. No answer is waited for."""
        for trainer in self.trainers:
            trainer.give_up.remote(engine.url, engine.incarnation)

    def on_lenders(self, method: str, *arguments: Any) -> None:
        """Calls a method of every engine that answers and lends its memory to trainers."""
        self.engines.call_lenders(method, *arguments)

    def on_rollout(
        self,
        method: str,
        *arguments: Any,
        for_what: str,
        limit_s: float,
        flag: str = "",
        on_poll: Callable[[], str] | None = None,
    ) -> Any:
        """Calls a method of the rollout side; its answer. `flag`: raises the limit."""
        answers = [getattr(self.rollout, method).remote(*arguments)]
        return wait_for(answers, for_what=for_what, limit_s=limit_s, on_poll=on_poll, flag=flag)[0]


LOOK_AGAIN_S = 0.2
NOTICE_S = 15.0
"""How long it may take until the end of an engine is noticed that a call to it failed of: more than its owner may be
silent, because the host may be gone without a word."""
LONGEST_REFUSAL_S = 3600.0
"""Between two weight syncs to an engine of somebody else that all fail at it: each costs the others one, too."""
STALLS_EVERY_S = 5.0
"""Between two questions whether engines bring tokens."""
ASKED = (State.SYNCING, State.READY, State.TAINTED)
"""Those that answer."""


class EnginesOfRun(EnginePort, Protocol):
    """Where the engines of a run are: `RayEngines` starts them, `ExternalEngines` were started by somebody else."""

    may_take_memory: Callable[[], bool]
    """Whether the trainer lends its memory now; set here."""
    dismissed: Callable[[Engine], None]
    """Called with an engine that nothing may be sent to; set here."""

    @property
    def takes_memory(self) -> bool:
        """Whether an engine that starts again may be taking memory now."""
        ...

    def engines(self) -> list[Engine]:
        """The first ones, before it is known that they answer."""
        ...

    def watch(self, engine: Engine) -> None:
        """Looks at an engine from now on, in the state that it is in."""
        ...

    def heard(self, index: int) -> None:
        """An engine lives: it has brought tokens."""
        ...

    def ask(self, index: int, method: str, *arguments: Any) -> Any:
        """A reference to the answer of the actor of an engine that lends its memory."""
        ...

    def stop(self, indices: Sequence[int]) -> list[Any]:
        """Asks the actors of these engines, if there are any, to end; references to their answers."""
        ...

    def close(self) -> None:
        """Looks at nothing any more."""
        ...


class Engines:
    """All engines of a run; none with --debug-train-only."""

    def __init__(
        self, args: Args, port: EnginesOfRun, rollout: Any, control_key: str | None, hosts: GuardedHosts
    ) -> None:
        """`rollout`: the actor that holds the routers; `control_key`: what a weight sync sends."""
        self._args, self._port, self._rollout, self._hosts = args, port, rollout, hosts
        self._control_key = control_key
        self.members = Membership(port.engines())
        self._supervisor = Supervisor(self.members, port, restarts=args.use_fault_tolerance)
        self._admissions: dict[str, Any] = {}
        """By address, the answers of the rollout side, which was asked to send to an engine."""
        self._stalled: Any = None
        """The answers of the rollout side, which was asked for engines that bring no tokens, and that bring some."""
        self._ask_for_stalls_at = self._served_at = time.monotonic()
        """`_served_at`: end of the last weight sync; what was seen before it says nothing of what serves now."""
        self.members.follow(lambda before, after: port.watch(after))
        port.dismissed = self._lost

    def __bool__(self) -> bool:
        return bool(self.members.engines)

    def may_take_memory(self, says: Callable[[], bool]) -> None:
        """`says` whether engines that start again may take the memory of their GPUs."""
        self._port.may_take_memory = says

    def up(self, index: int, url: str) -> None:
        """An engine of the start of the run answers."""
        self._supervisor.up(index, url)

    def tend(self) -> None:
        """Looks after them and all hosts once, without waiting. Raises `EngineError` if one cannot be kept alive."""
        self._hosts.tend()
        if self:
            self._supervisor.tend()
            self._look_for_stalls()
            self._admit()

    def tended(self) -> str:
        """`tend` while something else is waited for; which of them do not serve, as its progress."""
        self.tend()
        return "; ".join(str(engine) for engine in self.members.engines if engine.state is not State.READY) or "none"

    def call_lenders(self, method: str, *arguments: Any) -> None:
        """Calls a method of every engine that answers and lends its memory. One may be lost meanwhile."""
        self._call([engine for engine in self.members.of(*ASKED) if engine.lends], method, *arguments)

    def start_profile(self, directory: str, rollout_id: int) -> None:
        """Every engine that serves traces its next forward passes into `directory`. One may be lost meanwhile."""
        self._call(self.members.of(State.READY), "start_profile", directory, rollout_id)

    def _call(self, engines: Sequence[Engine], method: str, *arguments: Any) -> None:
        calls = {engine.index: self._port.ask(engine.index, method, *arguments) for engine in engines}
        while left := self._still(engines):
            try:
                self._wait_for_all(left, [calls[engine.index] for engine in left], method)
                return
            except Exception:
                if not self.lost_any(left):
                    raise

    def _wait_for_all(self, engines: Sequence[Engine], calls: Sequence[Any], method: str) -> None:
        """Raises what a call raises, or `EngineError` once one of these is lost: its answer may never come."""
        what = f"{method} on {len(engines)} engines"

        def none_lost() -> str:
            progress = self.tended()
            if gone := self.gone(engines):
                raise EngineError(f"{gone[0]}, during {what}")
            return progress

        wait_for(calls, for_what=what, limit_s=self._args.weight_sync_timeout_s, on_poll=none_lost)

    @contextmanager
    def frozen_aside(self) -> Iterator[None]:
        """Requests to frozen models that lend their memory wait during the block, as for a lost engine."""
        aside = [e for e in self.members.of(State.READY) if e.role == FROZEN and e.lends]
        for engine in aside:
            self._dismiss(engine)
        self._supervisor.syncing(aside)
        try:
            yield
        finally:
            self._supervisor.synced(aside, 0)
        self._admit()

    def begin_sync(self, engines: Sequence[Engine] | None = None) -> tuple[Engine, ...]:
        """Those that take weights now: `engines`, or all that answer. Waits until there is one."""
        limit_s = WORKING * self._args.engine_start_timeout_s
        if not self._tend_until(lambda: bool(self._still(engines)), limit_s):
            raise DeadlineExceeded.waiting(
                owner="weight sync",
                for_what="an engine that answers",
                limit_s=limit_s,
                last_progress="; ".join(map(str, self.members.engines)),
                flag=START_FLAG,
            )
        takers = self._still(engines)
        self._supervisor.syncing(takers)
        return tuple(self.members[engine.index] for engine in takers)

    def end_sync(self, engines: Sequence[Engine], version: WeightVersion) -> None:
        """These serve a version now, and get requests."""
        self._stalled, self._served_at = None, time.monotonic()
        self._ask_for_stalls_at = self._served_at + STALLS_EVERY_S
        self._supervisor.synced(engines, version)
        self._admit()

    def failed_sync(self, engines: Sequence[Engine], error: SlimeError) -> bool:
        """A weight sync to these failed. Whether another one may succeed, because one of them was lost.

        Where it failed at some engines alone (`SlimeError.engines`) and others are left, those are lost now. After a
        wait that ran out, one that hangs has the time to show it.
        """
        failed = [engine for engine in engines if engine.url in error.engines]
        if len(failed) != 1 and self.lost_any(engines):  # of several, one that died may have taken others with it
            return True
        if failed and len(failed) < len(self._still(None)):
            for engine in self._still(failed):
                self._supervisor.lost(engine, f"a weight sync failed at it: {error}", longest_s=LONGEST_REFUSAL_S)
            return True
        if self.lost_any(engines):
            return True
        self._supervisor.tainted(engines, str(error))
        return isinstance(error, DeadlineExceeded) and self.lost_any(engines, more_s=self._silence_s)

    def lost_any(self, engines: Sequence[Engine], *, more_s: float = 0.0) -> bool:
        """Whether one of these is not any more what it was; waits a little for that to show, and `more_s`.

        The little is by the clock: the process table says what has ended at once, however busy the machine is.
        """
        return self._tend_until(lambda: bool(self.gone(engines)), NOTICE_S / load() + more_s)

    def gone(self, engines: Sequence[Engine]) -> list[Engine]:
        """Of these, those that are not any more what they were."""
        still = {engine.index for engine in self._still(engines)}
        return [engine for engine in engines if engine.index not in still]

    @property
    def _silence_s(self) -> float:
        """After how long an engine that answers nothing counts as lost."""
        return float(self._args.rollout_health_check_timeout + self._args.rollout_health_check_interval)

    def joiners(self) -> tuple[Engine, ...]:
        """Those of the policy's that answer and serve no version."""
        return tuple(engine for engine in self._supervisor.wants_weights() if engine.role == POLICY)

    @property
    def take_weights(self) -> bool:
        """Whether any of them is the policy's."""
        return any(engine.role == POLICY for engine in self.members.engines)

    @property
    def can_answer(self) -> bool:
        """Whether those of the policy's that serve can answer a request: of pairs one of each kind."""
        kinds = {engine.worker for engine in self.members.engines if engine.role == POLICY}
        return {engine.worker for engine in self.members.of(State.READY) if engine.role == POLICY} == kinds

    def infos(self, engines: Sequence[Engine]) -> list[EngineInfo]:
        """What the weight sync needs to know of these."""
        return [EngineInfo(e.index, str(e.url), e.layout, e.slots, self._control_key, e.incarnation) for e in engines]

    def settle(self) -> None:
        """Waits until no engine is taking memory that a trainer is about to take."""
        limit_s = WORKING * self._args.engine_start_timeout_s
        if not self._tend_until(lambda: not self._port.takes_memory, limit_s):
            raise DeadlineExceeded.waiting(
                owner="trainer",
                for_what="an engine that starts on its GPU to have its memory",
                limit_s=limit_s,
                flag=START_FLAG,
            )

    def stop(self) -> list[Any]:
        """Asks all that are not dead to end; references to their answers."""
        return self._port.stop([engine.index for engine in self.members.engines if engine.state is not State.DEAD])

    def close(self) -> None:
        """Looks at none of them any more."""
        self._port.close()

    def _still(self, engines: Sequence[Engine] | None) -> tuple[Engine, ...]:
        """Of these, or of all of the policy's, those that answer and are of the same incarnation."""
        now = self.members.of(*ASKED)
        if engines is None:
            return tuple(engine for engine in now if engine.role == POLICY)
        known = {(engine.index, engine.incarnation) for engine in now}
        return tuple(engine for engine in engines if (engine.index, engine.incarnation) in known)

    def _admit(self) -> None:
        """Requests may go to every engine that is ready. Raises what the rollout side said to earlier ones."""
        if asked := list(self._admissions.values()):
            answered, _ = ray.wait(asked, timeout=0, num_returns=len(asked))
            wait_for(answered, for_what="the rollout side to know the engines", limit_s=NOTICE_S)
        for engine in self.members.of(State.READY):
            if engine.url and engine.url not in self._admissions:
                self._admissions[engine.url] = self._rollout.admit.remote(engine.model, [engine.url], engine.worker)

    def _look_for_stalls(self) -> None:
        """Gives up engines that bring no tokens, as their clients see: a scheduler may answer though nothing that it
        samples comes out. Those that bring some live, even if they answer nothing else. Asks again a while after each
        answer.
        """
        if self._stalled is None:
            if (now := time.monotonic()) >= self._ask_for_stalls_at:
                self._stalled = [
                    self._rollout.stalled.remote(now - self._served_at),
                    self._rollout.bringing.remote(STALLS_EVERY_S),
                ]
        elif all_there(self._stalled):
            stalled, bringing = (peek(answer) or () for answer in self._stalled)
            self._stalled, self._ask_for_stalls_at = None, time.monotonic() + STALLS_EVERY_S
            for engine in self.members.of(State.READY):
                if engine.url in bringing:
                    self._port.heard(engine.index)
                elif engine.url in stalled:
                    limit_s = self._args.request_timeout_s
                    self._supervisor.lost(
                        engine, f"it brought none of its requests a token for {limit_s:.0f} s (--request-timeout-s)"
                    )

    def _lost(self, engine: Engine) -> None:
        """The supervisor has given it up: with its host, or of its own. One of somebody else may just have left."""
        self._dismiss(engine, died=not engine.external and self._port.has_host(engine.index))

    def _dismiss(self, engine: Engine, *, died: bool = False) -> None:
        """Nothing is sent there any more. The answer is not waited for: requests there fail by themselves meanwhile."""
        if engine.url in self._admissions:
            del self._admissions[engine.url]
            self._rollout.dismiss.remote(engine.model, [engine.url], died)

    def _tend_until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        """Looks after them until something holds; False if it does not within the limit."""
        silence = Silence()
        while not holds():
            if silence.exceeds(limit_s):
                return False
            self.tend()
            time.sleep(LOOK_AGAIN_S)
        return True
