"""The hosts of a run: which of a Ray cluster's it takes, what they have, and that each sees what it must.

    a Ray that the run starts        this host, on loopback; planned before anything starts (`plan_here`)
    a Ray cluster that runs already  a plan over the free slots of its hosts, then an actor on each of them but the
                                     driver's: facts, shared folders, guardian (`hosts_of_run`)

Consumes what Ray says of its nodes. Produces the plan with its guarded hosts (`guarded_hosts` keeps them so), and at
its end an empty host for each. Waits for the actors of hosts, with a limit, on the driver's thread; nobody wakes it.

Invariants
1. Before the first engine or training rank starts, every host has a guardian and sees the shared folders.
2. The driver's host is `hosts[0]` of the plan; the rollout side runs there, beside the data and the user's modules.
3. A plan on one host meets on loopback, on a cluster, too.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from slime.cluster.guarded_hosts import GuardedHosts, OwnGuardian
from slime.cluster.placement import EngineDemand, Host, PlacementPlan, plan_placement
from slime.core.errors import START_FLAG, ConfigError
from slime.core.processes import LOOPBACK, ip_of
from slime.observability.run_folder import RunFolder
from slime.settings import Args
from slime.settings.topology_yaml import topology_of

logger = logging.getLogger(__name__)


def plan_here(args: Args) -> PlacementPlan:
    """The plan of a run that starts its own Ray: this host has what is asked for (`preflight` has looked)."""
    num_slots = args.actor_num_nodes * args.actor_num_gpus_per_node + args.rollout_num_gpus
    return _plan(args, [Host("this host", LOOPBACK, num_slots, len(os.sched_getaffinity(0)))])


@contextmanager
def hosts_of_run(args: Args, folder: RunFolder, guardian: OwnGuardian) -> Iterator[tuple[PlacementPlan, GuardedHosts]]:
    """On a Ray cluster that the driver has joined: the plan, with everything that the hosts have to hold for it.

    `guardian`: of this host. Raises `ConfigError` if the hosts have too little, or do not share what they must.
    """
    from slime.cluster.host_handle import HostHandle, RayNodes
    from slime.cluster.slots import give_back

    plan = _plan(args, nodes_of_cluster(args))
    limit_s = args.engine_start_timeout_s
    handles = [HostHandle(str(host.node_id), str(host), limit_s=limit_s) for host in plan.hosts[1:]]
    actors = [handle.actor for handle in handles]
    hosts: GuardedHosts | None = None
    try:
        plan = _with_facts(args, plan, actors)
        _check(args, plan)
        if actors:
            _require_shared(args, folder, plan.hosts[1:], actors)
            _on_all(args, actors, "guard", "guardians to watch", str(folder.logs))
            _tell(args, plan)
        for handle in handles:
            handle.guarded()
        nodes = RayNodes(args, log_dir=folder.logs)
        hosts = GuardedHosts(guardian, nodes, dict(zip(plan.hosts[1:], handles, strict=True)))
        yield plan, hosts
    finally:
        if handles:
            give_back()
        for left in handles if hosts is None else [hosts]:
            left.close()


def nodes_of_cluster(args: Args) -> list[Host]:
    """The living nodes of the cluster with the slots that are free there, the driver's first, then by address."""
    import ray
    from ray._private.state import available_resources_per_node  # the public state API tells totals alone (2.60)

    free = available_resources_per_node()
    here = ray.get_runtime_context().get_node_id()
    found = [
        host_of_node(node, free.get(node["NodeID"], {}), device=args.device, most=args.num_gpus_per_node)
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda host: (host.node_id != here, by_number(host.address), host.node_id))


def host_of_node(node: Mapping[str, Any], free: Mapping[str, float], *, device: str, most: int | None) -> Host:
    """What the plan may take of a node of Ray's. `free`: of its resources; `most`: slots of one host."""
    num_cpus = num_slots = int(free.get("CPU", 0))
    held_back = ""
    if device == "cuda":
        num_gpus = int(free.get("GPU", 0))
        num_slots = min(num_gpus, num_cpus)
        if num_gpus > num_cpus:  # a slot reserves a CPU, too
            held_back = (
                f"{num_gpus} GPUs are, but only {num_cpus} of the CPUs that Ray counts there, of which each slot takes "
                f"one: start Ray there with --num-cpus {num_gpus} or more, or end what takes CPUs"
            )
    if most and most < num_slots:
        num_slots, held_back = most, f"--num-gpus-per-node {most}"
    cores = max(int(node["Resources"].get("CPU", 1)), 1)
    return Host(node["NodeManagerHostname"], node["NodeManagerAddress"], num_slots, cores, node["NodeID"], held_back)


def by_number(address: str) -> tuple[int, int]:
    """10.0.0.9 before 10.0.0.10, IPv6 behind IPv4; names of hosts first."""
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
    """The same plan with what the hosts say of themselves: their cores decide the threads."""
    from slime.cluster.host_actor import facts_here

    facts = [facts_here(), *_on_all(args, actors, "facts", "the hosts of the run")]
    told = [
        dataclasses.replace(host, name=fact.name, num_cores=fact.num_cores)
        for host, fact in zip(plan.hosts, facts, strict=True)
    ]
    return _plan(args, told)


def _check(args: Args, plan: PlacementPlan) -> None:
    """What only the plan shows. Raises `ConfigError`."""
    tp_size = int(args.megatron["tensor_model_parallel_size"])
    if plan.split_groups(tp_size):
        logger.warning(
            "tensor-parallel groups of %d ranks have members on two hosts: every layer then waits for the network; "
            "give --actor-num-gpus-per-node a multiple of %d",
            tp_size,
            tp_size,
        )
    require_reach(args, plan)


def require_reach(args: Args, plan: PlacementPlan) -> None:
    """Every engine of the policy can see the memory through which weights are to reach it. Raises `ConfigError`."""
    if not plan.train_slots or args.update_weight_transport != "tensor" or args.device == "cuda":
        return  # on cuda each engine is on a GPU of a training rank, which sends to it
    sender = plan.slot_hosts[plan.train_slots[0]]
    running = [wanted for wanted in topology_of(args).wanted() if wanted.runs]
    apart = [
        placed.index
        for placed, wanted in zip(plan.engines, running, strict=True)
        if wanted.model.trained and any(plan.slot_hosts[slot] != sender for slot in placed.slots)
    ]
    if apart:
        raise ConfigError(
            f"got --update-weight-transport tensor with engines {apart} on other hosts than the training rank that "
            "sends, whose memory they cannot see; use distributed or disk"
        )


def _require_shared(args: Args, folder: RunFolder, hosts: Sequence[Host], actors: list[Any]) -> None:
    import ray

    from slime.cluster.shared_paths import contract_of, require_seen

    with contract_of(args, folder.path) as contract:
        found = _on_all(args, actors, "not_seen", "hosts to look for the shared folders", ray.put(contract))
    require_seen({str(host): problems for host, problems in zip(hosts, found, strict=True)})


def _tell(args: Args, plan: PlacementPlan) -> None:
    """Says who listens on a network, and what that means."""
    for h, host in enumerate(plan.hosts):
        ranks = [r for r, slot in enumerate(plan.train_slots) if plan.slot_hosts[slot] == h]
        engines = [e.index for e in plan.engines if any(plan.slot_hosts[slot] == h for slot in e.slots)]
        has = [f"training ranks {ranks}"] * bool(ranks) + [f"engines {engines}"] * bool(engines)
        has += ["the rollout side"] * (h == 0)
        logger.info("host %s has %s", host, ", ".join(has) or "nothing")
    logger.warning(
        "processes of this run listen on %s, where every host of that network reaches them: engines answer whoever has "
        "the key of the run, meeting points of process groups whoever knows their port; keep strangers off it",
        ", ".join(sorted({plan.address_of(slot) for slot in range(plan.num_slots)})),
    )


def _on_all(args: Args, actors: list[Any], method: str, for_what: str, *arguments: Any) -> list[Any]:
    from slime.cluster.waiting import wait_for

    calls = [getattr(actor, method).remote(*arguments) for actor in actors]
    return wait_for(calls, for_what=for_what, limit_s=args.engine_start_timeout_s, flag=START_FLAG)
