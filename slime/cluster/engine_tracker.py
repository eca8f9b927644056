"""Tracks the engines of a run for the driver: which ones serve, which need weights, and which receive requests.

`Engines` combines the membership, its supervisor and the engine actors. Routers and clients (on the rollout side) only
send requests to ready engines; actor calls and weight syncs go to all responding engines. While the driver waits, it
calls `tend`, which also checks the hosts' guardians. Used only from the driver's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from slime.cluster.hosts import GuardedHosts
from slime.cluster.waiting import all_there, peek, put_once, wait_for
from slime.core.engine_interface import WeightVersion
from slime.core.errors import START_FLAG, DeadlineExceeded, EngineError, Hung, SlimeError
from slime.core.liveness import WORKING, Silence
from slime.core.topology import EngineLayout, Worker
from slime.fleet.supervisor import (
    EVALUATION,
    FROZEN,
    POLICY,
    Engine,
    FleetFiles,
    Membership,
    State,
    Supervisor,
    is_named,
)
from slime.settings import Args

if TYPE_CHECKING:
    from slime.cluster.engine_actors import RayEngines
    from slime.fleet.external import ExternalEngines

logger = logging.getLogger(__name__)

WEIGHT_VERSION = "perf/weight_version"
"""Metric for the version that engines serve after a weight sync."""
OWN_TIME = "perf/rank_train_time"
"""Metric for the seconds of a rank's forward and backward passes, before it waits for the other replicas."""
TRAINERS_LIMIT_S = 24 * 3600.0
"""Timeout of a call to the training ranks, much longer than any training step. Waits within a call have their own
timeouts (--distributed-timeout-minutes, --weight-sync-timeout-s)."""
MEMORY_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a weight sync needs to know about an engine."""

    index: int
    url: str
    layout: EngineLayout
    slots: tuple[int, ...]
    """Slots of the engine's ranks, stage by stage. Training ranks in the same slots can share memory with it."""
    control_key: str | None = field(default=None, repr=False)
    incarnation: int = 0
    """Number of times the engine's processes were replaced. Distinguishes engines that used the same address."""


@dataclass(frozen=True, slots=True)
class Actors:
    """Handles of a run's actors (untyped in Ray). Calls block until all results arrive, unless noted otherwise."""

    trainers: tuple[Any, ...]
    """`TrainActor`s by rank. Empty with --debug-rollout-only."""
    engines: Engines
    """Empty with --debug-train-only."""
    rollout: Any

    def on_trainers(
        self,
        method: str,
        *arguments: Any,
        limit_s: float = TRAINERS_LIMIT_S,
        flag: str = "",
        on_poll: Callable[[], str] | None = None,
    ) -> list[Any]:
        """Calls a method on all training ranks and returns the results in rank order.

        `flag`: the setting for the time limit, named in the timeout error.
        """
        shared = [put_once(one) if isinstance(one, list | tuple) else one for one in arguments]
        refs = [getattr(trainer, method).remote(*shared) for trainer in self.trainers]
        what = f"{method} on {len(refs)} training ranks"
        return wait_for(refs, for_what=what, limit_s=limit_s, on_poll=on_poll, flag=flag)

    def give_up(self, engine: EngineInfo) -> None:
        """Notifies all training ranks of a lost engine, since any of them may be sending to it. Does not block."""
        for trainer in self.trainers:
            trainer.give_up.remote(engine.url, engine.incarnation)

    def on_lenders(self, method: str, *arguments: Any) -> None:
        """Calls a method on every responding engine that lends its memory to the trainer."""
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
        """Calls a method of the rollout actor and returns the result. `flag`: see `on_trainers`."""
        answers = [getattr(self.rollout, method).remote(*arguments)]
        return wait_for(answers, for_what=for_what, limit_s=limit_s, on_poll=on_poll, flag=flag)[0]


LOOK_AGAIN_S = 0.2
NOTICE_S = 15.0
"""After a failed engine call, how long to wait for the supervisor to detect that the engine is lost. Longer than
`OWNER_LIMIT_S`, because the only sign of a lost host is that the engine's actor does not respond."""
LONGEST_REFUSAL_S = 3600.0
"""Maximum backoff after failed weight syncs to an external engine. Each failure also fails the sync to the others."""
ORDERS_EVERY_S = 1.0
"""Interval between looks at the orders of `slime fleet`."""
STALLS_EVERY_S = 5.0
"""Interval between checks for engines that deliver no tokens."""
ASKED = (State.SYNCING, State.READY, State.TAINTED)
"""States in which an engine responds to calls."""


class Engines:
    def __init__(
        self,
        args: Args,
        port: RayEngines | ExternalEngines,
        rollout: Any,
        control_key: str | None,
        hosts: GuardedHosts,
        files: FleetFiles,
    ) -> None:
        """`rollout`: handle of the `RolloutActor`. `control_key`: API key for the engines' control routes."""
        self._args, self._port, self._rollout, self._hosts = args, port, rollout, hosts
        self._control_key = control_key
        self.members = Membership(port.engines())
        self._supervisor = Supervisor(
            self.members,
            port,
            restarts=args.use_fault_tolerance,
            vital=lambda engine: engine.role != EVALUATION or args.eval_fleet_must_work,
        )
        self._admitted: set[str] = set()
        """Addresses of the engines that may get requests."""
        self._admissions: list[Any] = []
        """Object refs of the rollout actor's pending `admit` calls."""
        self._stalled: Any = None
        """Object refs of the rollout actor's pending `stalled` and `progressing` calls."""
        self._ask_for_stalls_at = self._served_at = time.monotonic()
        """`_served_at`: end of the last weight sync. Earlier stalls are ignored, because engines may have recovered.
        """
        self._files = files
        files.begin()
        self._orders_at = 0.0
        self._away: frozenset[int] = frozenset()
        """Engines that the user has drained or is draining."""
        self._refused: dict[int, str] = {}
        self._lookers: list[Callable[[], None]] = []
        self.members.follow(lambda before, after: port.watch(after))
        port.dismissed = self._lost

    def __bool__(self) -> bool:
        return bool(self.members.engines)

    def may_take_memory(self, says: Callable[[], bool]) -> None:
        """Sets the function that decides whether restarting engines may allocate GPU memory."""
        self._port.may_take_memory = says

    def follow_looks(self, follower: Callable[[], None]) -> None:
        """Calls `follower` at the end of every `tend`."""
        self._lookers.append(follower)

    def up(self, index: int, url: str) -> None:
        """Records that engine `index` has started and responds at `url`."""
        self._supervisor.up(index, url)

    def tend(self) -> None:
        """Checks engines and hosts once, without blocking. Raises `EngineError` if an engine cannot be kept running."""
        self._hosts.tend()
        if self:
            self._follow_orders()
            self._supervisor.tend()
            self._look_for_stalls()
            self._admit()
        for follower in self._lookers:
            follower()

    def _follow_orders(self) -> None:
        """Drains the engines that `slime fleet` names, takes back those that it no longer names, and reports."""
        if time.monotonic() < self._orders_at:
            return
        self._orders_at = time.monotonic() + ORDERS_EVERY_S
        ordered = self._files.drained()
        engines = self.members.engines
        self._away = frozenset(e.index for e in engines if is_named(ordered, e.index, e.host))
        for index in self._supervisor.drained - self._away:
            self._supervisor.take_back(index)
        refused = {index: why for index in sorted(self._away) if (why := self._supervisor.drain(index))}
        for index in refused.keys() - self._refused.keys():
            logger.warning("%s", refused[index])
        self._refused = refused
        self._files.write(self.members.engines, self._supervisor.drained, refused)

    def tended(self) -> str:
        """Calls `tend` during some other wait. Returns a summary of the engines that are not ready."""
        self.tend()
        return "; ".join(str(engine) for engine in self.members.engines if engine.state is not State.READY) or "none"

    def call_lenders(self, method: str, *arguments: Any) -> None:
        """Implements `Actors.on_lenders`. Ignores engines that are lost during the call."""
        self._call([engine for engine in self.members.in_states(*ASKED) if engine.lends], method, *arguments)

    def start_profile(self, directory: str, rollout_id: int) -> None:
        """Makes every serving engine write a trace of its next forward passes to `directory`. Ignores lost engines."""
        self._call(self.members.in_states(State.READY), "start_profile", directory, rollout_id)

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
        """Waits for the calls. Raises the error of a failed call, or `EngineError` if an engine is lost."""
        what = f"{method} on {len(engines)} engines"

        def none_lost() -> str:
            progress = self.tended()
            if gone := self.gone(engines):
                raise EngineError(f"{gone[0]}, during {what}")
            return progress

        wait_for(calls, for_what=what, limit_s=self._args.weight_sync_timeout_s, on_poll=none_lost)

    @contextmanager
    def frozen_aside(self) -> Iterator[None]:
        """During the block, keeps requests away from frozen models that lend their memory."""
        aside = [e for e in self.members.in_states(State.READY) if e.role == FROZEN and e.lends]
        for engine in aside:
            self._dismiss(engine)
        self._supervisor.syncing(aside)
        try:
            yield
        finally:
            self._supervisor.synced(aside, 0)
        self._admit()

    def begin_sync(self, engines: Sequence[Engine] | None = None) -> tuple[Engine, ...]:
        """Begins a weight sync to `engines`, by default all policy engines. Returns the responding ones.

        Waits until at least one responds. Raises `DeadlineExceeded` after `WORKING` times --engine-start-timeout-s.
        """
        limit_s = WORKING * self._args.engine_start_timeout_s
        if not self._tend_until(lambda: bool(self._still(engines)), limit_s):
            raise DeadlineExceeded.waiting(
                owner="weight sync",
                for_what="an engine that responds",
                limit_s=limit_s,
                last_progress="; ".join(map(str, self.members.engines)),
                flag=START_FLAG,
            )
        takers = self._still(engines)
        self._supervisor.syncing(takers)
        return tuple(self.members[engine.index] for engine in takers)

    def end_sync(self, engines: Sequence[Engine], version: WeightVersion) -> None:
        """Records that `engines` serve `version` and allows requests to them."""
        self._stalled, self._served_at = None, time.monotonic()
        self._ask_for_stalls_at = self._served_at + STALLS_EVERY_S
        self._supervisor.synced(engines, version)
        self._admit()

    def begin_evaluation(self, *, waits: bool = False) -> tuple[Engine, ...]:
        """Begins to send weights to the evaluation fleet. Returns the responding engines.

        `waits`: if none responds, waits for one that is being restarted, for at most `WORKING` times
        --engine-start-timeout-s.
        """
        self.tend()
        if waits:
            limit_s = WORKING * self._args.engine_start_timeout_s
            self._tend_until(
                lambda: bool(self._of_role(EVALUATION)) or not self._supervisor.expects(EVALUATION), limit_s
            )
        takers = self._of_role(EVALUATION)
        self._supervisor.syncing(takers)
        return tuple(self.members[engine.index] for engine in takers)

    def serve_evaluation(self, engines: Sequence[Engine], version: WeightVersion) -> None:
        """Records that engines of the evaluation fleet serve `version` and allows requests to them."""
        self._supervisor.synced(engines, version)
        self._admit()

    def evaluating(self, version: WeightVersion) -> tuple[Engine, ...]:
        """Returns the engines of the evaluation fleet that serve `version`."""
        ready = self.members.in_states(State.READY)
        return tuple(engine for engine in ready if engine.role == EVALUATION and engine.version == version)

    def failed_sync(self, engines: Sequence[Engine], error: SlimeError) -> bool:
        """Handles a failed weight sync. Returns whether an engine was lost, in which case a retry might succeed.

        If only some engines failed (`SlimeError.engines`), declares them lost. After a timeout, waits long enough for
        the supervisor to detect a hung engine. A hang of the training ranks is none of the engines' business.
        """
        if isinstance(error, Hung):
            return False
        failed = [engine for engine in engines if engine.url in error.engines]
        if len(failed) != 1 and self.lost_any(engines):  # one dead engine can make the others fail
            return True
        if failed and len(failed) < len(self._of_role(engines[0].role)):
            for engine in self._still(failed):
                self._supervisor.lost(engine, f"the weight sync to it failed: {error}", longest_s=LONGEST_REFUSAL_S)
            return True
        if self.lost_any(engines):
            return True
        self._supervisor.tainted(engines, str(error))
        if not isinstance(error, DeadlineExceeded):
            return False
        return self._tend_until(lambda: bool(self.gone(engines)), self._silence_s) or self.lost_any(engines)

    @property
    def _silence_s(self) -> float:
        """How long an engine can be unresponsive before it counts as lost."""
        return float(self._args.rollout_health_check_timeout + self._args.rollout_health_check_interval)

    def lost_any(self, engines: Sequence[Engine]) -> bool:
        """Waits up to `NOTICE_S` for an engine to be lost or replaced. Returns whether that happened.

        The limit is wall-clock time even on a loaded machine, because the process table shows an exit immediately.
        """
        return self._tend_until(lambda: bool(self.gone(engines)), NOTICE_S, wall_clock=True)

    def gone(self, engines: Sequence[Engine]) -> list[Engine]:
        """Returns the lost and replaced engines among `engines`."""
        still = {engine.index for engine in self._still(engines)}
        return [engine for engine in engines if engine.index not in still]

    def joiners(self) -> tuple[Engine, ...]:
        """Returns the policy engines that respond but have not received weights from a sync yet."""
        return tuple(engine for engine in self._supervisor.wants_weights() if engine.role == POLICY)

    @property
    def take_weights(self) -> bool:
        """Whether there are policy engines."""
        return any(engine.role == POLICY for engine in self.members.engines)

    @property
    def can_answer(self) -> bool:
        """Whether the ready policy engines can serve requests. PD disaggregation requires an engine of each kind."""
        kinds = {engine.worker for engine in self.members.engines if engine.role == POLICY}
        return {engine.worker for engine in self.members.in_states(State.READY) if engine.role == POLICY} == kinds

    def infos(self, engines: Sequence[Engine]) -> list[EngineInfo]:
        return [EngineInfo(e.index, str(e.url), e.layout, e.slots, self._control_key, e.incarnation) for e in engines]

    def settle(self) -> None:
        """Waits until no restarting engine is allocating memory that the trainer needs."""
        limit_s = WORKING * self._args.engine_start_timeout_s
        if not self._tend_until(lambda: not self._port.takes_memory, limit_s):
            raise DeadlineExceeded.waiting(
                owner="trainer",
                for_what="a starting engine to allocate its GPU memory",
                limit_s=limit_s,
                flag=START_FLAG,
            )

    def stop(self) -> list[Any]:
        """Tells all live engines to stop. Returns object refs of the calls."""
        return self._port.stop([engine.index for engine in self.members.engines if engine.state is not State.DEAD])

    def close(self) -> None:
        self._files.end()
        self._port.close()

    def _still(self, engines: Sequence[Engine] | None) -> tuple[Engine, ...]:
        """Returns the members of `engines` that still respond and have not been replaced.

        None: returns all responding policy engines.
        """
        if engines is None:
            return self._of_role(POLICY)
        known = {(engine.index, engine.incarnation) for engine in self.members.in_states(*ASKED)}
        return tuple(engine for engine in engines if (engine.index, engine.incarnation) in known)

    def _of_role(self, role: str) -> tuple[Engine, ...]:
        """Returns the responding engines of a role."""
        return tuple(engine for engine in self.members.in_states(*ASKED) if engine.role == role)

    def _admit(self) -> None:
        """Allows requests to every ready engine. Does not block. Raises the errors of earlier `admit` calls."""
        if self._admissions:
            num = len(self._admissions)
            answered, self._admissions = ray.wait(self._admissions, timeout=0, num_returns=num)
            wait_for(answered, for_what="the rollout side to register the engines", limit_s=NOTICE_S)
        new: dict[tuple[str, Worker], list[str]] = {}
        for engine in self.members.in_states(State.READY):
            if engine.url and engine.url not in self._admitted:
                new.setdefault((engine.model, engine.worker), []).append(engine.url)
        for (model, worker), urls in new.items():  # one call for all of a kind
            self._admitted.update(urls)
            self._admissions.append(self._rollout.admit.remote(model, urls, worker))

    def _look_for_stalls(self) -> None:
        """Declares engines lost if they deliver no tokens. A stuck scheduler can still respond to health checks.

        Conversely, an engine that delivers tokens counts as alive even if health checks fail.
        """
        if self._stalled is None:
            if (now := time.monotonic()) >= self._ask_for_stalls_at:
                self._stalled = [
                    self._rollout.stalled.remote(now - self._served_at),
                    self._rollout.progressing.remote(STALLS_EVERY_S),
                ]
        elif all_there(self._stalled):
            stalled, bringing = (frozenset(peek(answer) or ()) for answer in self._stalled)
            self._stalled, self._ask_for_stalls_at = None, time.monotonic() + STALLS_EVERY_S
            for engine in self.members.in_states(State.READY):
                if engine.url in bringing:
                    self._port.heard(engine.index)
                elif engine.url in stalled:
                    limit_s = self._args.request_timeout_s
                    self._supervisor.lost(
                        engine, f"none of its requests received a token for {limit_s:.0f} s (--request-timeout-s)"
                    )

    def _lost(self, engine: Engine) -> None:
        """Handles an engine that the supervisor has declared lost.

        Reports it to the rollout side as dead, unless its host was lost, it is an external engine, or it is drained.
        """
        died = not engine.external and engine.index not in self._away and self._port.has_host(engine.index)
        self._dismiss(engine, died=died)

    def _dismiss(self, engine: Engine, *, died: bool = False) -> None:
        """Stops requests to an engine. Does not block, because requests in flight fail anyway."""
        if engine.url in self._admitted:
            self._admitted.remove(engine.url)
            self._rollout.dismiss.remote(engine.model, [engine.url], died)

    def _tend_until(self, holds: Callable[[], bool], limit_s: float, *, wall_clock: bool = False) -> bool:
        """Calls `tend` until `holds()` is true. Returns False if the limit expires first.

        On a loaded machine, the limit is extended as in `Silence`, unless `wall_clock` is set.
        """
        silence, end = Silence(), time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > end if wall_clock else silence.exceeds(limit_s):
                return False
            self.tend()
            time.sleep(LOOK_AGAIN_S)
        return True
