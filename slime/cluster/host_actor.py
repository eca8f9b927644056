"""Actor on each of a run's hosts except the driver's (`HostActor`), and the driver's handle for it (`HostHandle`).

The actor is the first and the last process of the run on its host. It reports facts about the host, checks that the
host sees the shared folders, and keeps a guardian running. The driver makes one call at a time, with a timeout.
There are two exceptions: `watching` returns when the guardian has exited and will not be replaced, and nobody waits for
the calls of the hang doctor.

The handle is used on the driver's thread and only blocks in `close`. For a host that comes back, it starts a thread
that writes the contract's tokens, because that is slow on a network file system. The thread removes the tokens once the
host has responded or the handle is dropped.

Invariants
1. A contract's tokens only exist while the host checks them.
2. Only the driver's thread calls Ray, because a call after Ray's shutdown would restart Ray.

`reserve` reserves the slots of a placement plan in Ray. Each slot is one bundle on its planned host. On multi-GPU
hosts, a probe in each bundle reports its GPU, and slots are numbered in device order, so consecutive ranks use adjacent
devices, and the slots of a host have different devices.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from slime.cluster.guardian import HostGuardian
from slime.cluster.hang_doctor import RunProcess, examine, stopped_processes
from slime.cluster.hosts import EMPTY_LIMIT_S, Contract, contract_of, not_seen, require_same_versions, versions_here
from slime.cluster.placement import Host, PlacementPlan, in_device_order
from slime.cluster.waiting import all_there, introduce, wait_for
from slime.core.blame import Process, error_line
from slime.core.cores import usable_cores
from slime.core.errors import START_FLAG, ConfigError, DeadlineExceeded, SlimeError
from slime.core.processes import RUN_ID_ENV
from slime.observability.logs import setup_logging
from slime.observability.stacks import Standing
from slime.settings import Args


@dataclass(frozen=True, slots=True)
class HostFacts:
    name: str
    num_cores: int
    """Number of cores available to Ray's processes on the host."""
    versions: dict[str, str]
    """Result of `versions_here`."""


def facts_here() -> HostFacts:
    return HostFacts(socket.gethostname(), usable_cores(), versions_here())


@ray.remote(max_restarts=0, num_cpus=0, max_concurrency=3)
class HostActor:
    """Runs a `HostGuardian` and checks the shared folders on its host."""

    def __init__(self) -> None:
        self._guardian: HostGuardian | None = None

    def facts(self) -> HostFacts:
        return facts_here()

    def not_seen(self, contract: Contract) -> list[str]:
        return not_seen(contract)

    def guard(self, log_dir: str) -> None:
        """Starts the guardian, so no process of the run on this host outlives the driver. `log_dir` is shared."""
        name = socket.gethostname()
        setup_logging(Path(log_dir) / f"host_{name}.log", crashes=True)
        self._guardian = HostGuardian(os.environ[RUN_ID_ENV], log_path=Path(log_dir) / f"guardian_{name}.log")

    def take_up(self, contract: Contract, log_dir: str) -> list[str]:
        """Checks the shared folders and returns those that the host cannot see. If none, starts a guardian.

        Raises `ConfigError` if the versions of this host differ from those of the driver's host.
        """
        require_same_versions("the driver's host", contract.versions, {socket.gethostname(): versions_here()})
        problems = not_seen(contract)
        if not problems:
            self.guard(log_dir)
        return problems

    def watching(self) -> None:
        """Returns when the guardian has exited and will not be replaced."""
        assert self._guardian is not None, "watching() before guard()"
        self._guardian.wait()

    def stopped(self) -> list[RunProcess]:
        return stopped_processes(os.environ[RUN_ID_ENV])

    def examine(self, responding: Sequence[str]) -> tuple[list[Standing], str]:
        """Reads the stacks of this host's processes that matter in a hang (`hang_doctor.examine`)."""
        return examine(os.environ[RUN_ID_ENV], responding)

    def close(self) -> None:
        """Kills all processes of the run on this host, except this one."""
        if self._guardian is not None:
            self._guardian.close()
            self._guardian = None


logger = logging.getLogger(__name__)

TOKENS_LIMIT_S = 5.0
"""Timeout for removing tokens at the end of the run."""


class HostHandle:
    def __init__(self, node_id: str, host: str, *, limit_s: float) -> None:
        """Starts the actor. `host`: the host's display name.

        `limit_s`: timeout for a response (--engine-start-timeout-s), including process start, imports, and waiting for
        a shared folder.
        """
        self._node_id, self._host, self._limit_s = node_id, host, limit_s
        actor: Any = HostActor.options(**on_node(node_id)).remote()  # type: ignore[attr-defined]
        self.actor = introduce(actor, Process("the actor that owns the guardian", host))
        self._watching: Any = None
        """Object ref of the `watching` call, which returns when the guardian has exited."""
        self._contract: Future[Contract] = Future()
        self._answered = threading.Event()
        self._holder: threading.Thread | None = None
        """Thread that writes and removes the tokens."""
        self._log_dir = Path()
        self._asked: Any = None
        self._asked_at = 0.0
        self._closing: Any = None

    def guarded(self) -> None:
        """Starts watching the guardian started by the actor. `watches` then returns whether it is still running."""
        self._watching = self.actor.watching.remote()

    def take_up(self, args: Args, log_dir: Path) -> None:
        """Makes the actor check the shared folders and start a guardian. `unseen` returns the result."""

        def keep_tokens() -> None:
            try:
                with contract_of(args, log_dir.parent, under_way=True) as contract:
                    self._contract.set_result(contract)
                    self._answered.wait()
            except BaseException as error:  # re-raised in `unseen`
                if self._contract.done():
                    logger.warning("cannot remove the token files for host %s: %s", self._node_id, error)
                else:
                    self._contract.set_exception(error)

        self._log_dir = log_dir
        self._holder = threading.Thread(target=keep_tokens, name=f"host {self._node_id[:8]}", daemon=True)
        self._holder.start()

    def unseen(self) -> list[str] | None:
        """Returns the shared folders that the host does not see, or None if it has not responded yet. Does not block.

        An empty list means that the host has a guardian. Raises `SlimeError` or `OSError` if no guardian was started.
        """
        if not self._contract.done():
            return None
        if self._asked is None:
            self._asked = self.actor.take_up.remote(self._contract.result(), str(self._log_dir))
            self._asked_at = time.monotonic()
        if not all_there([self._asked]):
            if time.monotonic() - self._asked_at > self._limit_s:
                what = f"a response from host {self._host}"
                raise DeadlineExceeded.waiting(owner="driver", for_what=what, limit_s=self._limit_s, flag=START_FLAG)
            return None
        self._answered.set()
        unseen: list[str]
        (unseen,) = wait_for([self._asked], for_what=f"the return of host {self._host}", limit_s=self._limit_s)
        if not unseen:
            self.guarded()
        return unseen

    def watches(self) -> bool:
        return not all_there([self._watching])

    def drop(self) -> None:
        """Kills the actor immediately. Does not block or raise."""
        self._answered.set()
        ray.kill(self.actor)

    def begin_close(self) -> None:
        """Starts to kill all processes of the run on the host. Does not block or raise."""
        if self._holder is not None and self._watching is None:  # the actor is the run's only process there
            self.drop()
        else:
            self._closing = self.actor.close.remote()

    def close(self, end_s: float) -> None:
        """Waits until all processes of the run on the host have exited, until the time `end_s` of `time.monotonic`.
        Call `begin_close` first. Never raises."""
        limit_s = max(end_s - time.monotonic(), 0.0)
        if self._closing is None:
            if self._holder is not None:
                self._holder.join(min(TOKENS_LIMIT_S, limit_s))
            return
        what = f"the processes on host {self._host} to exit"
        try:
            if not limit_s and not all_there([self._closing]):
                raise DeadlineExceeded.waiting(owner="driver", for_what=what, limit_s=EMPTY_LIMIT_S)
            wait_for([self._closing], for_what=what, limit_s=limit_s)
        except SlimeError as error:  # the guardian kills the run's processes there once Ray has killed the actor
            logger.warning(
                "host %s did not confirm that its processes have exited: %s", self._node_id, error_line(error)
            )


class RayNodes:
    def __init__(self, args: Args, *, log_dir: Path) -> None:
        self._args, self._log_dir = args, log_dir

    def living(self) -> dict[str, list[str]]:
        """Returns address -> ids of the live Ray nodes at that address."""
        found: dict[str, list[str]] = {}
        for node in ray.nodes():
            if node["Alive"]:
                found.setdefault(node["NodeManagerAddress"], []).append(node["NodeID"])
        return found

    def take_up(self, node_id: str) -> HostHandle:
        """Starts an actor on the node, which checks the shared folders and starts a guardian. Does not block."""
        handle = HostHandle(node_id, node_id[:8], limit_s=self._args.engine_start_timeout_s)
        handle.take_up(self._args, self._log_dir)
        return handle


# --- Slots

ON_HOST = 0.001
"""Amount of Ray's per-host resource that each bundle requests, to pin the bundle to the host. Small enough for all
bundles of a host."""
PROBE_SHARE = 0.1
NAME = "slots"
"""Name of the placement group in the run's Ray namespace."""


@dataclass(frozen=True, slots=True)
class Slots:
    group: Any
    """Ray's placement group."""
    unit: str
    """"GPU" or "CPU"."""
    bundles: tuple[int, ...]
    """[slots] bundle index of each slot in the placement group."""
    devices: tuple[str, ...] | None
    """[slots] GPU name as in CUDA_VISIBLE_DEVICES on its host: a number, or the UUID of a GPU or MIG instance. None on
    CPU, and if no host has more than one slot."""

    def options(self, slot: int, share: float) -> dict[str, Any]:
        """Returns the Ray options for an actor that uses the fraction `share` of a slot."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self.bundles[slot] if self.bundles else 0
        )
        resources = {"num_cpus": share} if self.unit == "CPU" else {"num_cpus": share, "num_gpus": share}
        return {**resources, "scheduling_strategy": strategy}


def on_node(node_id: str | None) -> dict[str, Any]:
    """Returns the Ray options that pin an actor to a node. None: the actor can run anywhere."""
    return {} if node_id is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


def reserve(plan: PlacementPlan, *, device: str, limit_s: float) -> Slots:
    unit = "GPU" if device == "cuda" else "CPU"
    on = [plan.hosts[h] for h in plan.slot_hosts]
    group = placement_group([_bundle(unit, host) for host in on] or [{"CPU": 1.0}], strategy="PACK", name=NAME)
    told = ", ".join(f"{on.count(host)} on {host}" for host in plan.hosts if host in on)
    what = f"slots with one {unit} each: {told or 'one'}"
    wait_for([group.ready()], for_what=what, limit_s=limit_s, flag=START_FLAG)
    bundles: tuple[int, ...] = tuple(range(plan.num_slots))
    if unit == "CPU" or len(set(plan.slot_hosts)) == plan.num_slots:
        return Slots(group, unit, bundles, None)
    devices = _devices(group, plan.num_slots, limit_s)
    _require_different(on, [name for _, name in devices])
    bundles = in_device_order(plan.slot_hosts, [place for place, _ in devices])
    return Slots(group, unit, bundles, tuple(devices[bundle][1] for bundle in bundles))


def give_back() -> None:
    """Removes the reservation, if any. Ray then kills the actors on the slots without reporting them as lost."""
    try:
        group = get_placement_group(NAME)
    except ValueError:  # the run has no reservation
        return
    remove_placement_group(group)


def _bundle(unit: str, host: Host) -> dict[str, float]:
    needs = {"CPU": 1.0} if unit == "CPU" else {"GPU": 1.0, "CPU": 1.0}
    return needs if host.node_id is None else {**needs, f"node:{host.address}": ON_HOST}


def _devices(group: Any, num_slots: int, limit_s: float) -> list[tuple[int, str]]:
    """Returns [bundles] (device position on the host, device name)."""
    probe: Any = ray.remote(_own_device)
    calls = [
        probe.options(
            num_cpus=PROBE_SHARE,
            num_gpus=PROBE_SHARE,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
        ).remote()
        for bundle in range(num_slots)
    ]
    return wait_for(calls, for_what="each slot to report its GPU", limit_s=limit_s, flag=START_FLAG)


def _own_device() -> tuple[int, str]:
    (device,) = map(str, ray.get_gpu_ids())
    if device.isdigit():
        return int(device), device
    listed = ray._private.worker.global_worker.original_visible_accelerator_ids  # Ray 2.60 has no public API for it
    names = [str(name) for name in listed.get("GPU") or ()]
    return names.index(device) if device in names else 0, device


def _require_different(hosts: Sequence[Host], names: Sequence[str]) -> None:
    """Raises `ConfigError` if two bundles share a GPU. Both arguments have one entry per bundle."""
    given = Counter(zip(hosts, names, strict=True))
    twice = [f"{name} of {host}" for (host, name), times in given.items() if times > 1]
    if twice:
        raise ConfigError(
            f"more than one slot has GPU {', '.join(twice)}, because CUDA_VISIBLE_DEVICES listed it twice when Ray was "
            "started; list each GPU once"
        )
