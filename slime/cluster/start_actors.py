"""Starts a run's engines, training ranks and rollout actor concurrently, on the slots of its placement plan.

Engines that share GPUs with the trainer import their modules while the trainer starts, but only allocate memory once
the trainer has lent its memory.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from slime.cluster.engine_actors import RayEngines
from slime.cluster.engine_tracker import Actors, Engines
from slime.cluster.hang_doctor import HangDoctor
from slime.cluster.host_actor import Slots, on_node, reserve
from slime.cluster.hosts import GuardedHosts
from slime.cluster.placement import PlacementPlan
from slime.cluster.rollout_actor import RolloutActor
from slime.cluster.train_actor import TrainActor
from slime.cluster.training_run import Run
from slime.cluster.waiting import all_there, introduce, put_once, wait_for
from slime.core.blame import Process
from slime.core.errors import START_FLAG
from slime.core.liveness import WORKING
from slime.core.processes import address_towards, host_of, is_loopback
from slime.core.text import EngineKeys
from slime.fleet.external import ExternalEngines
from slime.fleet.supervisor import FROZEN, Engine, FleetFiles
from slime.observability.progress import StartUp
from slime.observability.run_folder import RunFolder
from slime.observability.tracker import Tracker
from slime.serving.server import IMPORTING, engine_phase
from slime.settings import Args
from slime.settings.conditions import lends_at_start

READ_BYTES = 2**20
"""How much of an engine's log is read. The log has a few kilobytes by the time the engine is up."""
LOGS_PER_POLL = 8
"""Logs that a poll reads, in turn: hundreds of them on a network file system would slow it down."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A group of processes that is ready when all calls in `refs` have returned."""

    name: str
    refs: Sequence[Any]
    line: str
    """Logged when the group is ready."""


class StartProgress:
    """Shows which processes are not ready yet, and what the engines are doing according to their logs.

    `tell` is called on each poll of `wait_for`.
    """

    def __init__(
        self,
        startup: StartUp,
        waiting: Sequence[Waiting],
        *,
        began_s: float,
        note: Callable[[str], str],
        engine_logs: Sequence[Path] = (),
        ended: Callable[[Sequence[Any]], bool] = all_there,
    ) -> None:
        """`began_s`: `time.monotonic()` when the processes were started. `note`: shows a text. `ended`: returns whether
        all given calls have returned."""
        self._startup, self._note, self._ended = startup, note, ended
        self._waiting = [w for w in waiting if w.refs]
        self._phases = dict.fromkeys(engine_logs, IMPORTING)
        """Log of an engine -> what the engine was doing when it was last read, those read longest ago first."""
        self._imported = False
        self._began_s = began_s

    def tell(self) -> str:
        """Logs the groups that became ready since the last call. Returns a summary of those that are not ready."""
        seconds = time.monotonic() - self._began_s
        for waiting in [w for w in self._waiting if self._ended(w.refs)]:
            self._waiting.remove(waiting)
            self._startup.done(waiting.name, waiting.line, seconds)
        names = [w.name for w in self._waiting]
        if "engines" in names:
            for log in list(self._phases)[:LOGS_PER_POLL]:
                self._phases.pop(log)
                self._phases[log] = _phase_of(log)
            phases = sorted(set(self._phases.values()))
            if not self._imported and not any(phase.startswith(IMPORTING) for phase in phases):
                self._imported = True
                self._startup.part("engine_import", seconds)
            names[names.index("engines")] = f"engines ({', '.join(phases)})"
        return self._note(f"waiting for {', '.join(names)}" if names else "")


def _phase_of(log: Path) -> str:
    try:
        with log.open(errors="replace") as file:
            return engine_phase(file.read(READ_BYTES))
    except OSError:
        return IMPORTING


logger = logging.getLogger(__name__)

TRAIN_SHARE = 0.4
"""Fraction of a slot's GPU (or CPU) that a training rank reserves. Leaves enough for an engine in the same slot."""


def start(
    args: Args, plan: PlacementPlan, hosts: GuardedHosts, folder: RunFolder, tracker: Tracker, startup: StartUp
) -> Run:
    """Starts all processes and returns the `Run`. Raises the error of the first process that fails to start."""
    slots = reserve(plan, device=args.device, limit_s=args.engine_start_timeout_s)
    keys = keys_of(args)
    with tracker.progress("starting") as note:
        began_s = time.monotonic()
        port: RayEngines | ExternalEngines
        if args.rollout_external_engine_addrs:
            port, heads = _external(args, keys, note), []
            args = _with_external(args, port)
        else:
            port = RayEngines(args, plan, slots, hosts, log_dir=folder.logs, keys=keys)
            heads = port.heads
        trainers = _create_trainers(args, plan, folder, slots, _address_of(port, plan))
        rollout = _create_rollout(args, plan, folder, len(port.engines()), keys)
        building = _build_trainers(args, trainers)
        lent, opened = _lend(args, port.actors, trainers)
        ready = [engine.wait_ready.remote(args.engine_start_timeout_s) for engine in heads]
        digests = _warm_digests(args, port.engines(), heads, trainers)
        data = [rollout.ready.remote()]
        progress = StartProgress(
            startup,
            [
                Waiting("engines", ready, f"engines are up ({len(ready)})"),
                Waiting("data", data, "the data is ready"),
                Waiting("trainers", [*building, *lent], f"training ranks have loaded the model ({len(trainers)})"),
            ],
            began_s=began_s,
            note=note,
            engine_logs=[folder.logs / f"engine_{placed.index}.log" for placed in plan.engines],
        )
        results = wait_for(
            [*building, *ready, *data, *lent, *opened],  # builds come first, because a failed build also fails `lent`
            for_what=f"{len(ready)} engines and {len(trainers)} training ranks to start",
            limit_s=WORKING * args.engine_start_timeout_s * (2 if lent else 1) + 60,  # engines wait for the trainer
            on_poll=lambda: _told(port, hosts, progress),
            flag=START_FLAG,
        )
    for warning in results[len(building) + len(ready)]:
        logger.warning("%s", warning)
    for name, seconds in (results[len(building) - 1] if building else {}).items():
        startup.part(f"trainer_{name}", seconds)
    if port.engines() and trainers:
        with startup.phase("connect", "the weight sync is connected"):
            wait_for(
                [*digests, *(trainer.connect_engines.remote() for trainer in trainers)],
                for_what="the weight sync to connect",
                limit_s=args.weight_sync_timeout_s,
                flag="--weight-sync-timeout-s",
            )
    urls = results[len(building) : len(building) + len(ready)]
    fleet = _fleet(args, port, rollout, keys, hosts, FleetFiles(folder.path), urls)
    actors = Actors(trainers=tuple(trainers), engines=fleet, rollout=rollout)
    _tell_memory(actors, folder)
    doctor = HangDoctor(args, trainers, rollout, hosts, folder.logs, tell=tracker.hang)
    return Run(args, actors, tracker, startup, doctor)


def _fleet(
    args: Args,
    port: RayEngines | ExternalEngines,
    rollout: Any,
    keys: EngineKeys,
    hosts: GuardedHosts,
    files: FleetFiles,
    urls: Sequence[str],
) -> Engines:
    """Returns the tracker of the engines. `urls`: addresses of the engines that the run has started."""
    assert ray.is_initialized(), "Ray exited while the run was starting"
    fleet = Engines(args, port, rollout, keys.control, hosts, files)
    for index, url in enumerate(urls or port.urls):
        fleet.up(index, url)
    return fleet


def keys_of(args: Args) -> EngineKeys:
    """Returns the API keys of the run's engines, which keep out other users of the machine, who can access loopback.

    External engines keep the keys that they were started with.
    """
    use, admin = args.sglang.get("api_key") or args.router.get("api_key"), args.sglang.get("admin_api_key")
    if args.rollout_external_engine_addrs:
        return EngineKeys(use or secrets.token_hex(32), admin)
    return EngineKeys(use or secrets.token_hex(32), admin or secrets.token_hex(32))


def _tell_memory(actors: Actors, folder: RunFolder) -> None:
    """Logs and records the memory plan of the training rank with the highest demand. Does nothing if no GPU is lent."""
    plans = [plan for plan in actors.on_trainers("memory_plan") if plan is not None]
    if not plans:
        return
    plan = max(plans, key=lambda p: p.peaks["train"].trainer)
    logger.info("GPU memory: %s (of %.1f GB)", plan, plan.gpu_bytes / 1e9)
    for phase in plan.too_large():
        logger.warning("the phase %s will probably run out of memory; use more GPUs or more model parallelism", phase)
    folder.note("memory", plan.facts())


def _external(args: Args, keys: EngineKeys, note: Callable[[str], str]) -> ExternalEngines:
    """Waits until all external engines respond and are compatible. Nothing else starts before that."""
    port = ExternalEngines(args, keys)
    try:
        port.find(args.engine_start_timeout_s, note)
    except BaseException:
        port.close()
        raise
    return port


def _with_external(args: Args, port: ExternalEngines) -> Args:
    """Returns the settings with the external engines' GPU count and an absolute path for the disk transport."""
    changes: dict[str, Any] = {"rollout_num_gpus": port.num_gpus}
    if folder := args.components.get("update_weight_disk_dir"):
        changes["update_weight_disk_dir"] = str(Path(folder).absolute())
    return args.replace(**changes)


def _address_of(port: RayEngines | ExternalEngines, plan: PlacementPlan) -> Callable[[int], str]:
    """Returns a function that maps a slot to the address that its training rank listens on.

    With external engines on other hosts, the address is not loopback, because these engines could not reach it.
    """
    far = [host_of(url) for url in port.urls if not is_loopback(host_of(url))]
    if plan.several_hosts or not far:
        return plan.address_of
    here = address_towards(far[0])
    logger.warning(
        "training ranks listen on %s so that the engine at %s can reach them. They exchange pickles, so keep untrusted "
        "hosts off that network",
        here,
        far[0],
    )
    return lambda slot: here


def _create_trainers(
    args: Args, plan: PlacementPlan, folder: RunFolder, slots: Slots, address_of: Callable[[int], str]
) -> list[Any]:
    shared_args, train_slots = put_once(args), put_once(plan.train_slots)

    def created(rank: int, slot: int) -> Any:
        actor = _placed(TrainActor, **slots.options(slot, TRAIN_SHARE)).remote(
            shared_args, rank, train_slots, plan.train_threads[rank], str(folder.logs), address_of(slot)
        )
        host = str(plan.hosts[plan.slot_hosts[slot]])
        return introduce(actor, Process(f"training rank {rank}", host, folder.logs / f"train_{rank}.log"))

    return [created(rank, slot) for rank, slot in enumerate(plan.train_slots)]


def _build_trainers(args: Args, trainers: list[Any]) -> list[Any]:
    if not trainers:
        return []
    host, port = wait_for(
        [trainers[0].free_address.remote()],
        for_what="training rank 0",
        limit_s=args.engine_start_timeout_s,
        flag=START_FLAG,
    )[0]
    return [trainer.build.remote(host, port) for trainer in trainers]


def _lend(args: Args, engines: Sequence[Any], trainers: list[Any]) -> tuple[list[Any], list[Any]]:
    """If trainer and engines share GPUs, makes the trainer lend its memory and then opens the engines' memory gates.

    Returns the object refs of both kinds of calls.
    """
    lent = [trainer.sleep.remote() for trainer in trainers] if lends_at_start(args) else []
    return lent, [engine.open_gate.remote(*lent) for engine in engines] if lent else []


def _warm_digests(args: Args, engines: Sequence[Engine], heads: list[Any], trainers: list[Any]) -> list[Any]:
    """On GPUs, makes rank 0 and the engines that it sends to compile their digest kernels as soon as they are up.

    `heads`: the actors of `engines`; empty for external engines.
    """
    if args.device != "cuda" or not trainers or not heads:
        return []
    takers = [head for engine, head in zip(engines, heads, strict=True) if engine.role != FROZEN]
    return [actor.warm_digests.remote() for actor in (trainers[0], *takers)]  # rank 0 verifies the weights


def _create_rollout(args: Args, plan: PlacementPlan, folder: RunFolder, num_engines: int, keys: EngineKeys) -> Any:
    """Creates the rollout actor on the driver's host, which has the data and the user's modules."""
    beside_driver = on_node(plan.hosts[0].node_id)
    actor = _placed(RolloutActor, num_cpus=0, max_concurrency=16, **beside_driver)
    process = Process("the rollout process", str(plan.hosts[0]), folder.logs / "rollout.log")
    return introduce(actor.remote(args, num_engines, str(folder.logs), keys), process)


def _placed(actor: Any, **options: Any) -> Any:
    """Returns the actor class with these options. Exists because type checkers do not know Ray's `options` method."""
    return actor.options(**options)


def _told(port: RayEngines | ExternalEngines, hosts: GuardedHosts, progress: StartProgress) -> str:
    """Checks the hosts and returns the startup progress. Raises `EngineError` if an engine has lost a host."""
    hosts.tend()
    if isinstance(port, RayEngines):
        for index in range(len(port.heads)):
            port.require_followers(index)
    return progress.tell()
