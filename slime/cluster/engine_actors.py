"""Runs engines as Ray actors for the fleet's supervisor.

An engine has one actor (`EngineActor`) per host. The first one, the head, owns the server that handles requests.
Requests never pass through an actor, because rollout and weight sync send HTTP requests directly to the server.

The supervisor calls `RayEngines` on the driver's thread. Methods do not block: actors are called in the background, and
the results are read later (`troubles`, `started`). A restarted engine gets new actors in the same slots.

Invariants
1. An actor and all its child processes are dead before a new actor starts in its place. A server dies with its owner.
2. On GPUs shared with the trainer, a restarting engine only allocates memory while the trainer lends it.
3. An engine only restarts once all its hosts have a guardian.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from slime.cluster.host_actor import Slots
from slime.cluster.hosts import GuardedHosts
from slime.cluster.placement import Host, PlacementPlan
from slime.cluster.waiting import introduce, outcomes, put_once, translated
from slime.core.blame import Process
from slime.core.errors import EngineError
from slime.core.liveness import Silence
from slime.core.processes import LOOPBACK, host_port
from slime.core.text import EngineKeys
from slime.core.topology import EngineLayout, ServedModel, WantedEngine
from slime.fleet.supervisor import EVALUATION, EXPECTS_ANSWERS, FROZEN, POLICY, Engine, State
from slime.observability.logs import setup_logging
from slime.serving.agent_process import AgentProcess, AgentSettings
from slime.serving.control import HttpEngineControl
from slime.serving.leased_ports import PortLease, lease_meeting_point
from slime.serving.server import ServerSpec, SGLangServer
from slime.serving.watch import ServerWatch
from slime.settings import Args
from slime.settings.conditions import lends_at_start
from slime.settings.topology_yaml import layout_of_group, topology_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Node:
    """One host of a multi-host engine."""

    rank: int
    """Index of the host within the engine. The server on host 0 handles requests."""
    num_nodes: int
    gpu_ids: tuple[str, ...] | None
    """GPUs of the engine's ranks on this host. None on CPU."""


@ray.remote(max_restarts=0, concurrency_groups={"watch": 1})
class EngineActor:
    """Owns an `SGLangServer`. Calls run one at a time, except `problem`, which runs in parallel."""

    def __init__(
        self,
        name: str,
        spec: ServerSpec,
        log_dir: str,
        args: Args,
        host: str = LOOPBACK,
        node: Node | None = None,
        meeting_point: str | None = None,
        takes_weights: bool = True,
    ) -> None:
        """Starts the server.

        `name`: used for log files; the engine's index, plus number of restarts and host index if they are not 0.
        `host`: address that the server listens on. `node`, `meeting_point`: only for multi-host engines; the actor on
        the first host allocates the address where the engine's servers connect to each other. `takes_weights`: whether
        the engine serves the trainer's weights.
        """
        setup_logging(Path(log_dir) / f"engine_actor_{name}.log", crashes=True)
        self._name = name
        self._meeting: PortLease | None = None
        if node is not None:
            if meeting_point is None:
                self._meeting = lease_meeting_point()
                meeting_point = host_port(host, self._meeting.port)
            spec = dataclasses.replace(
                spec,
                num_nodes=node.num_nodes,
                node_rank=node.rank,
                gpu_ids=node.gpu_ids,
                dist_init_addr=meeting_point,
            )
        self._server = SGLangServer(spec, host=host, log_path=Path(log_dir) / f"engine_{name}.log")
        self._server.start()
        self._spec, self._args, self._takes_weights = spec, args, takes_weights
        self._watch: ServerWatch | None = None
        self._agent: AgentProcess | None = None
        self._agent_log = Path(log_dir) / f"weights_agent_{name}.log"
        if not spec.answers_requests:
            self._start_watch()

    def meeting_point(self) -> str:
        """Returns the HOST:PORT at which this engine's servers connect to each other (SGLang's `dist_init_addr`)."""
        assert self._spec.dist_init_addr is not None, "a single-host engine has no meeting point"
        return self._spec.dist_init_addr

    def open_gate(self, *_lent: object) -> None:
        """Lets the server allocate its memory. `_lent`: results of trainer calls that Ray awaits before this call."""
        self._server.open_gate()

    def wait_ready(self, timeout_s: float) -> str:
        """Waits until the server responds and returns its URL."""
        self._server.wait_ready(timeout_s)
        args, spec, url = self._args, self._spec, self._server.url
        self._control = HttpEngineControl(url, spec.layout, args.weight_sync_timeout_s, spec.keys.control)
        if (settings := self._agent_settings()) is not None:
            self._agent = AgentProcess(settings, url, spec.keys.control, self._agent_log)
        self._start_watch()
        return url

    def _agent_settings(self) -> AgentSettings | None:
        """Returns the settings of the weights agent, or None if the engine does not load weights from its own host."""
        args, local_dir = self._args, self._args.components.get("update_weight_local_checkpoint_dir")
        if local_dir is None or args.update_weight_transport != "disk" or not self._takes_weights:
            return None
        hook = args.custom_pull_weights_pre_read_path
        disk_dir = args.components["update_weight_disk_dir"]
        return AgentSettings(disk_dir, local_dir, hook, args.weight_sync_timeout_s)

    @ray.method(concurrency_group="watch")
    def problem(self, expects_answers: bool) -> str | None:
        """Returns the result of `ServerWatch.trouble`. Also restarts the weights agent if it has exited."""
        if self._agent is not None:
            self._agent.tend()
        return None if self._watch is None else self._watch.trouble(expects_answers=expects_answers)

    def _start_watch(self) -> None:
        args = self._args
        self._watch = ServerWatch(
            self._server.problem,
            self._server.scheduler_answers,
            interval_s=args.rollout_health_check_interval,
            timeout_s=args.rollout_health_check_timeout,
            first_wait_s=args.rollout_health_check_first_wait,
            # CPU time is a sign of progress only on CPU. On GPU, a scheduler that waits for a hung kernel also keeps a
            # core busy.
            used_s=self._server.processor_s if self._spec.device == "cpu" else None,
            stands=self._server.stands,
        )

    def warm_digests(self) -> None:
        """Makes the server compile its digest kernel. Call this after `wait_ready`."""
        self._control.weight_checksums()

    def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Releases device memory with the given tags, by default all of it. The engine must be idle."""
        self._control.flush_cache()
        self._control.release_memory(tags)

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        self._control.resume_memory(tags)

    def start_profile(self, directory: str, rollout_id: int) -> None:
        """Profiles the next forward passes as configured. If the server refuses, only logs a warning."""
        args = self._args
        try:
            self._control.start_profile(
                directory,
                f"step_{rollout_id}_engine_{self._name}",
                num_passes=args.profile_engine_passes,
                shapes=args.pytorch_profiler_collect_shapes,
                stack=args.pytorch_profiler_collect_callstack,
            )
        except EngineError as error:
            logger.warning("cannot profile the engine in step %d: %s", rollout_id, error)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._agent is not None:
            self._agent.stop()
        self._server.stop()
        if self._meeting is not None:
            self._meeting.release()


ENGINE_SHARE = 0.2
"""Fraction of a slot's GPU (or CPU) that an engine reserves. A training rank can reserve another fraction."""
LOOK_EVERY_S = 1.0
LOOKS_PER_S = 200
"""With many engines, each one is checked more rarely, so that the driver makes at most this many checks a second."""
OWNER_LIMIT_S = 7.0
"""How long an engine's actor may be unresponsive. This detects a frozen host long before Ray declares it dead."""
STARTING_OWNER_LIMIT_S = 30.0
TOKENS_LAST_S = 10.0
"""How long a delivered token counts as a sign of life. `Engines` polls the rollout actor every few seconds."""
END_LIMIT_S = 5.0
"""How long the actor of a lost engine has to stop its server before the actor is killed."""


@dataclass(frozen=True, slots=True)
class _Ending:
    """Actors that are being replaced."""

    actors: tuple[Any, ...]
    stopped: list[Any]
    """Object refs of their `stop` calls."""
    deadline: float
    incarnation: int
    """Number of restarts of the engine, including this one."""


def _role_of(model: ServedModel) -> str:
    if model.only_evaluates:
        return EVALUATION
    return POLICY if model.trained else FROZEN


class RayEngines:
    def __init__(
        self, args: Args, plan: PlacementPlan, slots: Slots, hosts: GuardedHosts, *, log_dir: Path, keys: EngineKeys
    ) -> None:
        """Creates the initial actors. Their servers start immediately."""
        self._args, self._plan, self._slots, self._hosts = args, plan, slots, hosts
        self._log_dir, self._keys, self._shared_args = log_dir, keys, put_once(args)
        running = [wanted for wanted in topology_of(args).wanted() if wanted.runs]
        self._placed = list(zip(plan.engines, running, strict=True))
        self.may_take_memory: Callable[[], bool] = lambda: True
        """Whether the trainer currently lends its memory. Set by `Engines`."""
        self.dismissed: Callable[[Engine], None] = lambda engine: None
        """Called with each engine that is taken out of service. Set by `Engines`."""
        self._gates: dict[int, bool] = {}
        """Index of an engine that is restarting on shared GPUs -> whether its memory gate is open."""
        self._ready: dict[int, Any] = {}
        self._ending: dict[int, _Ending] = {}
        self._looks: dict[tuple[int, int], tuple[Any, Silence]] = {}
        self._seen_at: dict[tuple[int, int], float] = {}
        self._heard_at: dict[int, float] = {}
        """Engine index -> time of the last delivered token."""
        self._crews = [self._create(index, 0) for index in range(len(self._placed))]
        self._look_every_s = max(LOOK_EVERY_S, len(self.actors) / LOOKS_PER_S)
        self._watched: dict[int, State] = {}

    def engines(self) -> list[Engine]:
        """Returns the initial records of all placed engines."""
        return [
            Engine(
                placed.index,
                placed.slots,
                self._layout(wanted),
                model=wanted.model.name,
                role=_role_of(wanted.model),
                worker=wanted.group.worker,
                lends=placed.colocated and self._args.offload_rollout,
                host=self._plan.address_of(placed.slots[0]),
            )
            for placed, wanted in self._placed
        ]

    @property
    def heads(self) -> list[Any]:
        """[engines] the actor that owns the server that handles requests."""
        return [crew[0] for crew in self._crews]

    @property
    def urls(self) -> list[str]:
        """Always empty, because an engine's address is unknown until it responds."""
        return []

    @property
    def actors(self) -> list[Any]:
        return [actor for crew in self._crews for actor in crew]

    def ask(self, index: int, method: str, *arguments: Any) -> Any:
        """Calls a method of an engine's head. Returns the object ref of the call."""
        return getattr(self.heads[index], method).remote(*arguments)

    def stop(self, indices: Sequence[int]) -> list[Any]:
        """Tells these engines' actors to stop if they are not already stopping. Returns object refs of the calls."""
        return [actor.stop.remote() for index in indices if index not in self._ending for actor in self._crews[index]]

    def close(self) -> None:
        self._watched.clear()

    def newcomers(self) -> Sequence[tuple[Engine, str]]:
        """Always empty, because the plan contains all engines of the run."""
        return ()

    def is_gated(self, index: int) -> bool:
        """Returns whether the engine may only allocate memory while the trainer lends it."""
        return lends_at_start(self._args) and self._placed[index][0].colocated

    def watch(self, engine: Engine) -> None:
        """Starts or stops watching an engine, depending on its state. Dead and starting engines are not watched."""
        if engine.answers and engine.state is not State.DEAD:
            self._watched[engine.index] = engine.state
        else:
            self._watched.pop(engine.index, None)
            for member in range(len(self._crews[engine.index])):
                self._looks.pop((engine.index, member), None)

    def heard(self, index: int) -> None:
        """Records that the engine has just delivered tokens, which is a sign of life."""
        self._heard_at[index] = time.monotonic()

    def troubles(self) -> Mapping[int, str]:
        found: dict[int, str] = {}
        answered = outcomes([ref for ref, _ in self._looks.values()])
        for index, state in self._watched.items():
            for member in range(len(self._crews[index])):
                if problem := self._look(index, member, state, answered):
                    found.setdefault(index, problem)
        return found

    def start(self, engine: Engine) -> None:
        """Tells the old actors to stop. `started` replaces them once they have stopped or after `END_LIMIT_S`."""
        old = self._crews[engine.index]
        stopped = [actor.stop.remote() for actor in old]
        self._ending[engine.index] = _Ending(old, stopped, time.monotonic() + END_LIMIT_S, engine.incarnation)

    def started(self, index: int) -> str | None:
        if index in self._ending and not self._replaced(index):
            return None
        self.require_followers(index)
        if not self._gates.get(index, True):
            self._open_gate(index)
        if index not in self._ready:  # the engine's memory gate is still closed
            return None
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

    def require_followers(self, index: int) -> None:
        """Raises `EngineError` if a starting engine has a problem on a host other than the first.

        `wait_ready` reports problems on the first host.
        """
        for member in range(1, len(self._crews[index])):
            asked = self._looks.get((index, member))
            answered = outcomes([asked[0]] if asked else [])
            if problem := self._look(index, member, State.STARTING, answered):
                raise EngineError(f"engine {index} did not start: on its host {member}, {problem}")

    def has_host(self, index: int) -> bool:
        return all(self._hosts.has(host) for host in self._hosts_of(index))

    def dismiss(self, engine: Engine) -> None:
        self.watch(engine.moved(State.DEAD))
        self.dismissed(engine)

    @property
    def takes_memory(self) -> bool:
        """Whether a restarting engine might be allocating memory right now."""
        return any(self.is_gated(index) for index in self._ready)

    def _look(self, index: int, member: int, state: State, answered: Mapping[Any, Any]) -> str | None:
        """Returns the problem found by an actor's pending check, if it has finished or is taking too long.

        Starts a new check if the last one is older than `_look_every_s`.
        """
        now, key = time.monotonic(), (index, member)
        asked = self._looks.get(key)
        if asked is None:
            if now - self._seen_at.get(key, 0.0) >= self._look_every_s:
                brings = now - self._heard_at.get(index, -TOKENS_LAST_S) < TOKENS_LAST_S
                asks = state in EXPECTS_ANSWERS and not brings
                self._looks[key] = self._crews[index][member].problem.remote(asks), Silence()
            return None
        ref, silence = asked
        if ref not in answered:
            late = silence.exceeds(STARTING_OWNER_LIMIT_S if state is State.STARTING else OWNER_LIMIT_S)
            return f"its actor has not responded for {silence.lasts_s:.0f} s" if late else None
        del self._looks[key]
        self._seen_at[key] = now
        problem: str | RayError | None = answered[ref]
        return str(translated(problem, f"a check of engine {index}")) if isinstance(problem, RayError) else problem

    def _open_gate(self, index: int) -> None:
        if self.may_take_memory():
            for actor in self._crews[index]:
                actor.open_gate.remote()
            self._gates[index] = True
            self._wait_ready(index)  # must come last, because this call would block `open_gate` on the head

    def _wait_ready(self, index: int) -> None:
        self._ready[index] = self._crews[index][0].wait_ready.remote(self._args.engine_start_timeout_s)

    def _create(self, index: int, incarnation: int) -> tuple[Any, ...]:
        placed, _ = self._placed[index]
        crew: list[Any] = []
        for node, part in enumerate(placed.parts):
            actor = EngineActor.options(**self._slots.options(part[0], ENGINE_SHARE))  # type: ignore[attr-defined]
            name = str(index) if not incarnation else f"{index}_{incarnation}"
            name += f"_node{node}" * bool(node)
            meeting = [crew[0].meeting_point.remote()] if node else []
            own = Node(node, len(placed.parts), self._gpus(part)) if len(placed.parts) > 1 else None
            host = self._plan.address_of(part[0])
            trained = self._placed[index][1].model.trained
            words = (name, self._spec(index), str(self._log_dir), self._shared_args, host, own, *meeting)
            owner = Process(
                f"the actor of engine {index}" + f", on its host {node}," * bool(node),
                str(self._plan.hosts[self._plan.slot_hosts[part[0]]]),
                self._log_dir / f"engine_actor_{name}.log",
            )
            crew.append(introduce(actor.remote(*words, takes_weights=trained), owner))
        return tuple(crew)

    def _spec(self, index: int) -> ServerSpec:
        placed, wanted = self._placed[index]
        overrides = dict(wanted.group.overrides)
        # A frozen model that lends its memory needs a CPU backup, because no weight sync restores its weights.
        if placed.colocated and not wanted.model.trained:
            overrides.setdefault("enable_weights_cpu_backup", True)
        return ServerSpec.from_args(
            self._args,
            index=index,
            num_threads=placed.num_threads,
            keys=self._keys,
            gpu_ids=self._gpus(placed.slots) if len(placed.parts) == 1 else None,
            model_path=wanted.model.path,
            layout=self._layout(wanted),
            overrides=overrides,
            shares=placed.colocated,
            worker=wanted.group.worker,
        )

    def _hosts_of(self, index: int) -> set[Host]:
        return {self._plan.hosts[self._plan.slot_hosts[slot]] for slot in self._plan.engines[index].slots}

    def _gpus(self, slots: Sequence[int]) -> tuple[str, ...] | None:
        """Returns the names of the slots' GPUs on their host. None: Ray only exposes the right GPU to each process."""
        return tuple(self._slots.devices[slot] for slot in slots) if self._slots.devices else None

    def _layout(self, wanted: WantedEngine) -> EngineLayout:
        return layout_of_group(self._args, wanted.model, wanted.group)

    def _replaced(self, index: int) -> bool:
        """Replaces an engine's actors if its hosts have guardians and the old actors have stopped or timed out.

        Returns whether they were replaced. Does not block.
        """
        ending = self._ending[index]
        if not all(self._hosts.is_guarded(host) for host in self._hosts_of(index)):
            return False
        done, _ = ray.wait(ending.stopped, num_returns=len(ending.stopped), timeout=0)
        if len(done) < len(ending.stopped) and time.monotonic() < ending.deadline:
            return False
        del self._ending[index]
        for actor in ending.actors:
            ray.kill(actor)
        self._crews[index] = self._create(index, ending.incarnation)
        if self.is_gated(index):
            self._gates[index] = False
        else:
            self._wait_ready(index)
        return True
