"""Selects the hosts of a run, keeps a guardian on each, and checks that all of them see the shared folders.

    Ray started by the run       uses only this host, on loopback; planned before any process starts (`plan_here`)
    existing Ray cluster         plans with the free slots of its hosts, then starts an actor on each host except the
                                 driver's to report host facts, check folders and start a guardian (`hosts_of_run`)

`GuardedHosts` keeps a guardian on every host. On the driver's host, the driver restarts a killed guardian (`Guardian`).
On the other hosts, an actor owns the guardian (`HostActor`), and the driver has a `HostHandle` for the actor. `tend`
acts on the state of each Ray node at a host's address, without blocking:

    guarded                                engines may start; the handle reports when the guardian exits
    lost its actor or its guardian         a new actor after `AFTER_LOSS_S`; the host still counts as present
    new, because the host was away         a new actor immediately; the host counts as present once it is guarded
    rejected, because a folder is not      retried every `ASK_AGAIN_S`; the host counts as away
    visible or no guardian starts

Before any engine starts, every host is checked for access to certain folders (`contract_of`):

    written by the run   run folder, --save, --save-hf, disk transport folder   must be the same folder at the same path
    read by its ranks    --hf-checkpoint and other models                       must have the same files (may be copies)
    working directory    for relative paths and the user's modules              must exist

All hosts must have the same versions of Python, of slime's sources, and of the packages in `COMPARED`.

For the first kind, the driver writes a token to each folder, and every host reads it back. For the second kind, driver
and host compare file names and sizes. On a slow network file system, files have `SEEN_WITHIN_S` to appear.

Everything runs on the driver's thread. Only `hosts_of_run` and `close` wait for host actors, with timeouts.

Invariants
1. Before the first engine or training rank starts, every host has a guardian, the driver's versions, and sees the
   shared folders.
2. After that, an engine only starts on a host other than the driver's if its guardian is known to be
   running (`is_guarded`).
3. A rejected host is retried as long as the run lasts.
4. The driver's host is `hosts[0]` of the plan. The rollout actor runs there, because it has the data and the user's
   modules.
5. If a plan has only one host, its processes communicate over loopback, even on a cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import slime
from slime.cluster.placement import EngineDemand, Host, PlacementPlan, plan_placement
from slime.core.cores import usable_cores
from slime.core.errors import START_FLAG, ActorDied, ConfigError, SlimeError
from slime.core.processes import LOOPBACK, ip_of
from slime.observability.run_folder import RunFolder
from slime.settings import Args
from slime.settings.groups.training import world_divides
from slime.settings.topology_yaml import topology_of

if TYPE_CHECKING:
    from slime.cluster.guardian import Guardian
    from slime.cluster.host_actor import HostHandle, RayNodes

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 30.0
"""Time between a rejection and the next attempt. A shared folder may be mounted late."""
AFTER_LOSS_S = 5.0
"""Delay before a lost actor is replaced. If it were replaced earlier, the old guardian would kill the new actor too."""
EMPTY_LIMIT_S = 120.0
"""Timeout for the guardians to kill all processes on their hosts, which usually takes up to 15 s."""
MOST_DEATHS = 12
"""Number of consecutive actor deaths (about a minute, while an old guardian is running) before the host is rejected."""


@dataclass(slots=True, eq=False)
class _Node:
    host: Host
    handle: HostHandle | None = None
    """None between attempts."""
    is_guarded: bool = False
    is_there: bool = False
    """Whether the node was guarded and has not been rejected since."""
    again_at: float = 0.0
    refusal: str = ""
    """The last logged reason for a rejection."""
    num_died: int = 0
    """Number of actors that died since the node was last guarded."""


class GuardedHosts:
    """Keeps a guardian on each host of a plan."""

    def __init__(
        self,
        own: Guardian,
        nodes: RayNodes | None = None,
        first: Mapping[Host, HostHandle] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first`: handles of all guarded hosts except the driver's. `nodes`: required if there are any."""
        self._own, self._ray, self._clock = own, nodes, clock
        self._others = tuple(first or {})
        self._nodes = {str(h.node_id): _Node(h, handle, True, True) for h, handle in (first or {}).items()}
        self._at: dict[str, list[_Node]] = {}
        """Address of another host -> its nodes."""
        for node in self._nodes.values():
            self._at.setdefault(node.host.address, []).append(node)

    def tend(self) -> None:
        """Checks all hosts once and replaces lost guardians."""
        self._own.tend()
        for node in self._nodes.values():
            if node.is_guarded and node.handle is not None and not node.handle.watches():
                logger.warning("lost the guardian of host %s or the actor that owns it", node.host)
                node.is_guarded = False
                self._put_off(node, AFTER_LOSS_S)
        if self._ray is None or all(self.is_guarded(host) for host in self._others):
            return
        living = self._ray.living()
        for host in self._others:
            for node_id in living.get(host.address, ()):
                if node_id not in self._nodes:
                    self._nodes[node_id] = _Node(host)
                    self._at[host.address].append(self._nodes[node_id])
                self._go_on(node_id, self._nodes[node_id])
        known = {node_id for nodes in living.values() for node_id in nodes}
        for node_id in self._nodes.keys() - known:
            node = self._nodes.pop(node_id)
            self._at[node.host.address].remove(node)
            self._put_off(node, 0.0)

    def is_guarded(self, host: Host) -> bool:
        """Returns whether engines may start on the host now."""
        return host.address not in self._at or any(node.is_guarded for node in self._at[host.address])

    def has(self, host: Host) -> bool:
        """Returns whether the host is present, that is, guarded now or expected to be guarded again soon."""
        return host.address not in self._at or any(node.is_there for node in self._at[host.address])

    def handles(self) -> list[HostHandle]:
        """Returns the handles of the other hosts that are guarded now."""
        return [node.handle for node in self._nodes.values() if node.is_guarded and node.handle is not None]

    def close(self) -> None:
        """Kills all processes of the run on the other hosts, on all of them at once. Never raises."""
        close_all([node.handle for node in self._nodes.values() if node.handle is not None])

    def _go_on(self, node_id: str, node: _Node) -> None:
        if node.is_guarded:
            return
        if node.handle is None:
            if self._ray is not None and self._clock() >= node.again_at:
                logger.info("host %s is back; checking its shared folders and starting its guardian", node.host)
                node.handle = self._ray.take_up(node_id)
            return
        try:
            if (unseen := node.handle.unseen()) is None:
                return
        except ActorDied as error:  # an old guardian killed the actor, or the host was lost again
            node.num_died += 1
            if node.num_died > MOST_DEATHS:
                self._refuse(node, f"its actor died {node.num_died} times before it had a guardian: {error}")
                return
            logger.warning("host %s did not start a guardian: %s", node.host, error)
            self._put_off(node, AFTER_LOSS_S)
            return
        except (SlimeError, OSError) as error:
            self._refuse(node, f"it did not start a guardian: {error}")
            return
        if unseen:
            self._refuse(node, f"it does not see {'; '.join(unseen)}")
        else:
            logger.info("host %s has a guardian again", node.host)
            node.is_guarded = node.is_there = True
            node.refusal, node.num_died = "", 0

    def _refuse(self, node: _Node, because: str) -> None:
        if node.refusal != because:
            logger.warning("not using host %s because %s; retrying every %.0f s", node.host, because, ASK_AGAIN_S)
        node.refusal, node.is_there = because, False
        self._put_off(node, ASK_AGAIN_S)

    def _put_off(self, node: _Node, pause_s: float) -> None:
        if node.handle is not None:
            node.handle.drop()
        node.handle, node.again_at = None, self._clock() + pause_s


def plan_here(args: Args) -> PlacementPlan:
    """Returns the plan of a run that starts its own Ray. Assumes that `preflight` has checked the GPU or core count."""
    num_slots = args.actor_num_nodes * args.actor_num_gpus_per_node + args.rollout_num_gpus
    num_slots += topology_of(args).num_eval_gpus
    return _plan(args, [Host("this host", LOOPBACK, num_slots, usable_cores())])


@contextmanager
def hosts_of_run(args: Args, folder: RunFolder, guardian: Guardian) -> Iterator[tuple[PlacementPlan, GuardedHosts]]:
    """Yields the placement plan and the guarded hosts on the Ray cluster that the driver has joined.

    `guardian`: the guardian of this host. Raises `ConfigError` if the hosts have too few slots or do not share the
    required folders.
    """
    import ray

    from slime.cluster.host_actor import HostHandle, RayNodes, give_back

    plan = _plan_when_possible(args)
    limit_s = args.engine_start_timeout_s
    handles = [HostHandle(str(host.node_id), str(host), limit_s=limit_s) for host in plan.hosts[1:]]
    actors = [handle.actor for handle in handles]
    hosts: GuardedHosts | None = None
    try:
        plan = _with_facts(args, plan, actors)
        _check(args, plan)
        if actors:
            with contract_of(args, folder.path) as contract:
                asked = ray.put(contract)
                found = _on_all(args, actors, "not_seen", "hosts to check the shared folders", asked)
            require_seen(dict(zip(map(str, plan.hosts[1:]), found, strict=True)))
            _on_all(args, actors, "guard", "guardians to watch", str(folder.logs))
            _tell(plan)
        for handle in handles:
            handle.guarded()
        nodes = RayNodes(args, log_dir=folder.logs)
        hosts = GuardedHosts(guardian, nodes, dict(zip(plan.hosts[1:], handles, strict=True)))
        yield plan, hosts
    finally:
        if handles:
            give_back()
        if hosts is None:
            close_all(handles)
        else:
            hosts.close()


def close_all(handles: Sequence[HostHandle]) -> None:
    """Kills all processes of the run on these hosts. Never raises.

    Asks all of them before it waits for one, and waits `EMPTY_LIMIT_S` for all together.
    """
    for handle in handles:
        handle.begin_close()
    end_s = time.monotonic() + EMPTY_LIMIT_S
    for handle in handles:
        handle.close(end_s)


TELL_EVERY_S = 30.0
LOOK_EVERY_S = 1.0


def _plan_when_possible(args: Args) -> PlacementPlan:
    """Returns the plan. Waits up to --cluster-wait-s for hosts, and asks the cluster's autoscaler for them.

    Raises the `ConfigError` of the last attempt.
    """
    began_s, told_s, limit_s = time.monotonic(), -TELL_EVERY_S, args.cluster_wait_s
    try:
        while True:
            hosts = nodes_of_cluster(args)
            try:
                return _plan(args, hosts)
            except ConfigError as error:
                waited_s = time.monotonic() - began_s
                if waited_s >= limit_s:
                    error.add_note(f"the run waited {waited_s:.0f} s for hosts; --cluster-wait-s raises the limit")
                    error.num_hosts = num_hosts_that_fit(args, hosts)
                    raise
                if waited_s >= told_s + TELL_EVERY_S:
                    if told_s < 0:
                        _ask_autoscaler(bundles_of(args))
                    told_s = waited_s
                    logger.warning("waiting for hosts, at most %.0f s more: %s", limit_s - waited_s, error)
            time.sleep(LOOK_EVERY_S)
    finally:
        if told_s >= 0:
            _ask_autoscaler([])


def on_fewer_hosts(args: Args, num_hosts: int) -> Args:
    """Returns the settings of the same run with this number of training hosts. Engines that share their GPUs shrink
    with them."""
    shared = args.colocate and args.sglang_config is None and not args.rollout_external_engine_addrs
    size = args.actor_num_gpus_per_node
    fewer = args.replace(actor_num_nodes=num_hosts)
    if shared and args.rollout_num_gpus == args.actor_num_nodes * size:
        fewer = fewer.replace(rollout_num_gpus=num_hosts * size)
    return fewer


def num_hosts_that_fit(args: Args, hosts: Sequence[Host]) -> int | None:
    """Returns the largest number of training hosts below --actor-num-nodes for which `hosts` have room, or None.

    At least --min-actor-num-nodes, if that is set; otherwise None.
    """
    fewest = args.min_actor_num_nodes or args.actor_num_nodes
    for num in range(args.actor_num_nodes - 1, fewest - 1, -1):
        fewer = on_fewer_hosts(args, num)
        with contextlib.suppress(ConfigError):
            if world_divides(fewer) is None and _plan(fewer, hosts):
                return num
    return None


def bundles_of(args: Args) -> list[dict[str, float]]:
    """Returns the resources of a run, as Ray's autoscaler expects them: one bundle per training host and engine."""
    num_training = 0 if args.debug_rollout_only else args.actor_num_nodes
    sizes = [args.actor_num_gpus_per_node] * num_training
    wanted = [engine.num_gpus for engine in topology_of(args).wanted()]
    if args.colocate:  # the first engines share the training slots
        shared = sum(sizes)
        while wanted and shared > 0:
            shared -= wanted.pop(0)
    for size in wanted:  # an engine that is larger than a training host spans hosts of that size
        most = max(args.actor_num_gpus_per_node, 1) if size % max(args.actor_num_gpus_per_node, 1) == 0 else size
        sizes += [min(size, most)] * (size // min(size, most))
    unit = {"GPU": 1.0, "CPU": 1.0} if args.device == "cuda" else {"CPU": 1.0}
    return [{name: amount * size for name, amount in unit.items()} for size in sizes]


def _ask_autoscaler(bundles: list[dict[str, float]]) -> None:
    """Asks for room for these bundles; [] takes the request back. Without an autoscaler, this has no effect."""
    from ray.autoscaler.sdk import request_resources

    try:
        request_resources(bundles=bundles)
    except Exception as error:  # hosts may come by themselves
        logger.warning("cannot ask the cluster's autoscaler for hosts: %s", error)


def nodes_of_cluster(args: Args) -> list[Host]:
    """Returns the cluster's live nodes with their free slots: the driver's node first, then sorted by address."""
    import ray
    from ray._private.state import available_resources_per_node  # Ray's public state API only has totals (2.60)

    free = available_resources_per_node()
    here = ray.get_runtime_context().get_node_id()
    found = [
        host_of_node(node, free.get(node["NodeID"], {}), device=args.device, most=args.num_gpus_per_node)
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda host: (host.node_id != here, by_number(host.address), host.node_id))


def host_of_node(node: Mapping[str, Any], free: Mapping[str, float], *, device: str, most: int | None) -> Host:
    """Converts a Ray node to a `Host`. `free`: the node's free resources. `most`: maximum number of slots."""
    num_cpus = num_slots = int(free.get("CPU", 0))
    held_back = ""
    if device == "cuda":
        num_gpus = int(free.get("GPU", 0))
        num_slots = min(num_gpus, num_cpus)
        if num_gpus > num_cpus:  # a slot also reserves a CPU
            held_back = (
                f"{num_gpus} GPUs are free, but each slot also takes a CPU, and Ray has only {num_cpus} free CPUs "
                f"there: start Ray with --num-cpus {num_gpus} or more, or stop other Ray tasks"
            )
    if most and most < num_slots:
        num_slots, held_back = most, f"--num-gpus-per-node {most}"
    cores = max(int(node["Resources"].get("CPU", 1)), 1)
    return Host(node["NodeManagerHostname"], node["NodeManagerAddress"], num_slots, cores, node["NodeID"], held_back)


def by_number(address: str) -> tuple[int, int]:
    """Returns a sort key that puts 10.0.0.9 before 10.0.0.10, hostnames first and IPv6 last."""
    ip = ip_of(address)
    return (0, 0) if ip is None else (ip.version, int(ip))


def _plan(args: Args, hosts: Sequence[Host]) -> PlacementPlan:
    return plan_placement(
        num_nodes=0 if args.debug_rollout_only else args.actor_num_nodes,
        num_per_node=args.actor_num_gpus_per_node,
        engines=[EngineDemand(wanted.num_gpus, wanted.runs) for wanted in topology_of(args).wanted()],
        colocate=args.colocate,
        hosts=hosts,
        max_threads=int(os.environ.get("OMP_NUM_THREADS", 0)) or None,
    )


def _with_facts(args: Args, plan: PlacementPlan, actors: list[Any]) -> PlacementPlan:
    """Plans again with the names and core counts reported by the hosts. Thread counts depend on the cores."""
    from slime.cluster.host_actor import facts_here

    facts = [facts_here(), *_on_all(args, actors, "facts", "the hosts of the run")]
    others = {str(host): fact.versions for host, fact in zip(plan.hosts[1:], facts[1:], strict=True)}
    require_same_versions(f"the driver's host {plan.hosts[0]}", facts[0].versions, others)
    told = [
        dataclasses.replace(host, name=fact.name, num_cores=fact.num_cores)
        for host, fact in zip(plan.hosts, facts, strict=True)
    ]
    return _plan(args, told)


def _check(args: Args, plan: PlacementPlan) -> None:
    """Warns about tensor-parallel groups that span hosts. Raises `ConfigError` if weights cannot reach an engine."""
    tp_size = int(args.megatron["tensor_model_parallel_size"])
    if plan.split_groups(tp_size):
        logger.warning(
            "tensor-parallel groups of %d ranks span two hosts, so every layer communicates over the network; set "
            "--actor-num-gpus-per-node to a multiple of %d",
            tp_size,
            tp_size,
        )
    require_reach(args, plan)


def require_reach(args: Args, plan: PlacementPlan) -> None:
    """Raises `ConfigError` if the transport uses shared memory and a policy engine is not on the sender's host."""
    if not plan.train_slots or args.update_weight_transport != "tensor" or args.device == "cuda":
        return  # on CUDA, each engine shares a GPU with the training rank that sends to it
    sender = plan.slot_hosts[plan.train_slots[0]]
    running = [wanted for wanted in topology_of(args).wanted() if wanted.runs]
    apart = [
        placed.index
        for placed, wanted in zip(plan.engines, running, strict=True)
        if wanted.model.trained and any(plan.slot_hosts[slot] != sender for slot in placed.slots)
    ]
    if apart:
        raise ConfigError(
            f"--update-weight-transport tensor cannot reach engines {apart}, because they do not run on the host of "
            "the sending training rank and cannot map its memory; use distributed or disk"
        )


def _tell(plan: PlacementPlan) -> None:
    """Logs which processes run on which host and which addresses are exposed to the network."""
    for h, host in enumerate(plan.hosts):
        ranks = [r for r, slot in enumerate(plan.train_slots) if plan.slot_hosts[slot] == h]
        engines = [e.index for e in plan.engines if any(plan.slot_hosts[slot] == h for slot in e.slots)]
        has = [f"training ranks {ranks}"] * bool(ranks) + [f"engines {engines}"] * bool(engines)
        has += ["the rollout side"] * (h == 0)
        logger.info("host %s has %s", host, ", ".join(has) or "nothing")
    logger.warning(
        "processes of this run listen on %s and can be reached by every host of that network. Engines require the "
        "run's key, but process groups have no authentication, so keep untrusted hosts off that network",
        ", ".join(sorted({plan.address_of(slot) for slot in range(plan.num_slots)})),
    )


def _on_all(args: Args, actors: list[Any], method: str, for_what: str, *arguments: Any) -> list[Any]:
    from slime.cluster.waiting import wait_for

    calls = [getattr(actor, method).remote(*arguments) for actor in actors]
    return wait_for(calls, for_what=for_what, limit_s=args.engine_start_timeout_s, flag=START_FLAG)


COMPARED = ("ray", "torch", "sglang", "sglang-router", "megatron-core", "transformers", "triton", "safetensors")
"""Packages whose versions all hosts must share, if they have them."""


def versions_here() -> dict[str, str]:
    """Returns name -> version on this host: Python, slime's sources, and the packages of `COMPARED` that it has."""
    found = {"Python": platform.python_version(), "slime": f"{slime.__version__} with sources {_digest_of_sources()}"}
    for name in COMPARED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _digest_of_sources() -> str:
    root, hasher = Path(slime.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        hasher.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return hasher.hexdigest()[:8]


def require_same_versions(driver: str, wanted: Mapping[str, str], found: Mapping[str, Mapping[str, str]]) -> None:
    """Raises one `ConfigError` for all hosts that differ from the driver's. `found`: host -> its `versions_here`."""
    told = [f"{host} {text}" for host, text in differing_versions(driver, wanted, found).items()]
    if told:
        raise ConfigError(
            f"hosts have different versions: {'; '.join(told)}; install the same versions in the environment from "
            "which `ray start` was called on each host, and restart Ray there"
        )


def differing_versions(
    driver: str, wanted: Mapping[str, str], found: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Returns host -> what it has and `driver` has, for hosts that differ. `found`: host -> its `versions_here`.

    A package that only one of two hosts has is not a difference: a host without engines may lack SGLang.
    """
    told = {}
    for host, versions in found.items():
        names = [name for name in wanted if versions.get(name, wanted[name]) != wanted[name]]
        if names:
            theirs, ours = (" and ".join(f"{name} {of[name]}" for name in names) for of in (versions, wanted))
            told[host] = f"has {theirs}, but {driver} has {ours}"
    return told


SEEN_WITHIN_S = 30.0
"""How long it may take a host to see a new file. NFS caches folders for up to 30 s by default."""
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Contract:
    """The folders that every other host must see in the same state as the driver."""

    tokens: dict[str, tuple[str, str]]
    """Flag of a folder that the run writes -> (token file, content)."""
    digests: dict[str, tuple[str, str]]
    """Flag of a folder that the run reads -> (folder, result of `listing`)."""
    start_folder: str
    versions: dict[str, str]
    """Result of `versions_here` on the driver's host."""


@contextmanager
def contract_of(args: Args, run_dir: Path, *, under_way: bool = False) -> Iterator[Contract]:
    """Writes the tokens, yields the contract, and removes the tokens after the block.

    `under_way`: do not compare checkpoint folders, because the run may be writing to them.
    """
    tokens: dict[str, tuple[str, str]] = {}
    made: list[Path] = []
    try:
        for flag, folder in _written(args, run_dir).items():
            made += _make(folder)
            file, token = folder / f".seen-by-every-host-{secrets.token_hex(4)}", secrets.token_hex(16)
            file.write_text(token)
            tokens[flag] = (str(file), token)
        digests = {flag: (str(folder), listing(folder)) for flag, folder in _read(args, under_way).items()}
        yield Contract(tokens, digests, os.getcwd(), versions_here())
    finally:
        for name, _ in tokens.values():
            Path(name).unlink(missing_ok=True)
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # no longer empty
                folder.rmdir()


def not_seen(contract: Contract, *, limit_s: float = SEEN_WITHIN_S) -> list[str]:
    """Returns descriptions of the folders that this host sees differently. Waits up to `limit_s` for them to appear."""
    deadline = time.monotonic() + limit_s
    while (problems := _look(contract)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return problems


def require_seen(found: dict[str, list[str]]) -> None:
    """Raises one `ConfigError` for all folders that are not shared. `found`: host -> result of `not_seen`."""
    told = [f"{host} does not see {problem}" for host, problems in found.items() for problem in problems]
    if told:
        raise ConfigError(
            f"hosts do not share these paths: {'; '.join(told)}. The processes of a run use the same paths on all "
            "hosts; put the folders on a file system that all hosts mount at the same path, or use one host"
        )


def listing(folder: Path) -> str:
    """Returns a digest of the names and sizes of a folder's files and the content of its config.json.

    For a file, the digest covers its name and size.
    """
    hasher = hashlib.sha256()
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    for file in files:
        if file.is_file():
            hasher.update(f"{file.name} {file.stat().st_size}\n".encode())
    if (folder / "config.json").is_file():
        hasher.update((folder / "config.json").read_bytes())
    return hasher.hexdigest()


def _written(args: Args, run_dir: Path) -> dict[str, Path]:
    """Returns flag -> folder for the folders that the run writes and that other hosts use."""
    found = {"--run-dir": run_dir}
    if args.save:
        found["--save"] = Path(args.save)
    if args.save_hf:
        parts = Path(args.save_hf).parts
        whole = next((i for i, part in enumerate(parts) if "{" in part), len(parts))
        found["--save-hf"] = Path(*parts[:whole]) if whole else Path()
    if args.update_weight_transport == "disk":
        found["--update-weight-disk-dir"] = Path(args.components["update_weight_disk_dir"])
    return {flag: folder.absolute() for flag, folder in found.items()}


def _read(args: Args, under_way: bool) -> dict[str, Path]:
    """Returns flag -> path for everything that all ranks read, except folders that the run may be changing."""
    changing = {Path(path).absolute() for path in (args.load, args.save) if path} if under_way else set()
    given = {
        "--hf-checkpoint": args.hf_checkpoint,
        "--load": args.load,
        "--load or --ref-load": args.initial_weights,
        "--ref-load": args.ref_load,
        "--critic-load": args.critic_load,
        "--opd-teacher-load": args.opd_teacher_load,
        **(
            {f"--sglang-config, model {m.name}": m.path for m in topology_of(args).models} if args.sglang_config else {}
        ),
    }
    found = {flag: Path(path).absolute() for flag, path in given.items() if path and Path(path).exists()}
    return {flag: path for flag, path in found.items() if path not in changing}


def _make(folder: Path) -> list[Path]:
    """Creates a folder and its parents. Returns the folders that did not exist, outermost first."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _look(contract: Contract) -> list[str]:
    problems = []
    for flag, (name, token) in contract.tokens.items():
        try:
            seen = Path(name).read_text()
        except OSError as error:
            problems.append(f"{flag} {Path(name).parent} ({error.strerror})")
            continue
        if seen != token:
            problems.append(f"{flag} {Path(name).parent} (a different folder has this path)")
    for flag, (path, digest) in contract.digests.items():
        if not Path(path).exists():
            problems.append(f"{flag} {path} (no such folder)")
        elif listing(Path(path)) != digest:
            problems.append(f"{flag} {path} with the same files (names, sizes, config.json)")
    if not os.path.isdir(contract.start_folder):
        problems.append(f"the folder in which the run was started, {contract.start_folder} (no such folder)")
    return problems
