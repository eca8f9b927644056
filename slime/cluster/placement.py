"""Which process gets which slot of which host: a pure plan, made before any process of the run is placed.

A *slot* is one GPU, or on a host without GPUs one of the CPUs that Ray counts there. Training takes `num_nodes` hosts
with `num_per_node` slots each; an engine takes slots of one host, those of training ranks when colocated.

Invariants
1. Every training rank has exactly one slot and every engine `num_per_engine` consecutive ones, all of one host.
2. Slots are numbered host by host, so training ranks that are neighbours are on one host as long as it has slots.
3. Without `colocate` no slot is used twice; with it, a slot holds at most one training rank and one engine rank.
4. The threads of processes that compute on one host at the same time never add up to more than its cores (one at least
   each).
5. The choice is greedy, the fullest host that has room first: among the hosts of a plan alone it is the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime.core.addresses import LOOPBACK
from slime.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Host:
    """One host as the plan sees it."""

    name: str
    """As people call it."""
    address: str
    """Where other hosts reach it."""
    num_slots: int
    """Slots that the run may take."""
    num_cores: int
    """Cores of processes that run there."""
    node_id: str | None = None
    """Ray's name of it; None before Ray."""

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """One inference engine."""

    index: int
    slots: tuple[int, ...]
    """Slots of its ranks, in order."""
    colocated: bool
    """True if a training rank lives on one of its slots."""
    num_threads: int
    """CPU threads per engine rank (meaningful on a CPU only)."""


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Slots of the whole run."""

    hosts: tuple[Host, ...]
    """Hosts of the run: the driver's first, even if it has no slot, then those with slots."""
    slot_hosts: tuple[int, ...]
    """Of each slot, the index of its host; it never falls."""
    train_slots: tuple[int, ...]
    """Slot of each training rank; empty without training."""
    engines: tuple[EnginePlacement, ...]
    train_threads: tuple[int, ...]
    """CPU threads of each training rank (meaningful on a CPU, and for an optimizer in host memory)."""

    @property
    def num_slots(self) -> int:
        return len(self.slot_hosts)

    @property
    def several_hosts(self) -> bool:
        """Whether processes of the run meet over a network."""
        return len(self.hosts) > 1

    def address_of(self, slot: int) -> str:
        """Where the processes of a slot listen, and the others of the run reach them."""
        return self.hosts[self.slot_hosts[slot]].address if self.several_hosts else LOOPBACK

    def split_groups(self, size: int) -> bool:
        """Whether some of the groups of `size` neighbouring training ranks have members on two hosts."""
        hosts = [self.slot_hosts[slot] for slot in self.train_slots]
        return any(len(set(hosts[i : i + size])) > 1 for i in range(0, len(hosts), size))


def plan_placement(
    *,
    num_nodes: int,
    num_per_node: int,
    num_rollout: int,
    num_per_engine: int,
    colocate: bool,
    hosts: Sequence[Host],
    max_threads: int | None = None,
) -> PlacementPlan:
    """Plans `num_nodes` x `num_per_node` training ranks, and `num_rollout` engine slots in engines of `num_per_engine`.

    `hosts`: those that may be used, the driver's first. `num_nodes` is 0 without training. `max_threads`: most threads
    of one process. Raises `ConfigError` if engine slots do not divide into engines, or the hosts have too few slots.
    """
    if num_rollout % max(num_per_engine, 1):
        raise ConfigError(
            f"got {num_rollout} rollout GPUs for engines of {num_per_engine}, which does not divide them; "
            "change --rollout-num-gpus or --rollout-num-gpus-per-engine"
        )
    num_engines = num_rollout // num_per_engine if num_per_engine else 0
    free = [host.num_slots for host in hosts]
    train_on = _training_hosts(num_nodes, num_per_node, free, hosts)
    if colocate and train_on:
        engine_on = _shared_hosts(num_engines, num_per_engine, num_per_node, train_on)
    else:
        engine_on = [_engine_host(i, num_engines, num_per_engine, free, hosts) for i in range(num_engines)]
    used = sorted({0, *train_on, *engine_on})
    return _numbered(
        tuple(hosts[h] for h in used),
        [used.index(h) for h in train_on for _ in range(num_per_node)],
        [used.index(h) for h in engine_on],
        num_per_engine,
        shared=colocate and bool(train_on),
        max_threads=max_threads,
    )


def _training_hosts(num_nodes: int, num_per_node: int, free: list[int], hosts: Sequence[Host]) -> list[int]:
    """The hosts that train, in order; what they give is no longer `free`."""
    able = sorted((n, h) for h, n in enumerate(free) if n >= num_per_node)
    if len(able) < num_nodes:
        raise ConfigError(
            f"got --actor-num-nodes {num_nodes} with --actor-num-gpus-per-node {num_per_node}: that takes {num_nodes} "
            f"host{'s' * (num_nodes > 1)} with {num_per_node} free slots each; {_told(free, hosts)}; lower one of the "
            "two, or add hosts to the Ray cluster"
        )
    chosen = sorted(h for _, h in able[:num_nodes])
    for h in chosen:
        free[h] -= num_per_node
    return chosen


def _shared_hosts(num_engines: int, num_per_engine: int, num_per_node: int, train_on: list[int]) -> list[int]:
    """Of each colocated engine the host whose training slots it shares: as many on each as fit whole."""
    places = [h for h in train_on for _ in range(num_per_node // num_per_engine)]
    if len(places) < num_engines:
        raise ConfigError(
            f"got --colocate with {num_engines} engines of {num_per_engine} on {len(train_on)} hosts of {num_per_node} "
            f"training slots each, where {len(places)} fit, because the ranks of an engine are on one host; give "
            f"--rollout-num-gpus-per-engine a divisor of {num_per_node}"
        )
    return places[:num_engines]


def _engine_host(index: int, num_engines: int, size: int, free: list[int], hosts: Sequence[Host]) -> int:
    """The fullest host with room for one more engine; its slots are no longer `free`."""
    able = sorted((n, h) for h, n in enumerate(free) if n >= size)
    if not able:
        raise ConfigError(
            f"got {num_engines} engines of {size} slots, whose ranks are on one host: no host is left for engine "
            f"{index} beside the training ranks; {_told(free, hosts)}; lower --rollout-num-gpus or "
            "--rollout-num-gpus-per-engine, or add hosts to the Ray cluster"
        )
    chosen = able[0][1]
    free[chosen] -= size
    return chosen


def _told(free: list[int], hosts: Sequence[Host]) -> str:
    return "free are " + ", ".join(f"{n} on {host}" for n, host in zip(free, hosts, strict=True))


def _numbered(
    hosts: tuple[Host, ...],
    ranks: list[int],
    engines: list[int],
    size: int,
    *,
    shared: bool,
    max_threads: int | None,
) -> PlacementPlan:
    """Numbers the slots host by host. `ranks`, `engines`: the host of each; engines have `size` slots."""
    slot_hosts: list[int] = []
    rank_slots: dict[int, int] = {}
    engine_slots: dict[int, tuple[int, ...]] = {}
    train_threads: dict[int, int] = {}
    engine_threads: dict[int, int] = {}
    for h, host in enumerate(hosts):
        ours, theirs = [r for r, at in enumerate(ranks) if at == h], [e for e, at in enumerate(engines) if at == h]
        first = len(slot_hosts)
        first_of_engines = first if shared else first + len(ours)
        rank_slots |= {rank: first + i for i, rank in enumerate(ours)}
        for i, engine in enumerate(theirs):
            engine_slots[engine] = tuple(range(first_of_engines + i * size, first_of_engines + (i + 1) * size))
        num_slots = max(len(ours), first_of_engines - first + len(theirs) * size)
        slot_hosts += [h] * num_slots
        # Colocated phases alternate, so each phase may use all cores; decoupled ones run side by side.
        together = (len(ours), len(theirs) * size) if shared else (num_slots, num_slots)
        train_threads |= dict.fromkeys(ours, _threads(host, together[0], max_threads))
        engine_threads |= dict.fromkeys(theirs, _threads(host, together[1], max_threads))
    return PlacementPlan(
        hosts,
        tuple(slot_hosts),
        tuple(rank_slots[r] for r in range(len(ranks))),
        tuple(EnginePlacement(e, engine_slots[e], shared, engine_threads[e]) for e in range(len(engines))),
        tuple(train_threads[r] for r in range(len(ranks))),
    )


def _threads(host: Host, together: int, most: int | None) -> int:
    """Of one of `together` processes that compute at the same time on a host."""
    return max(1, min(most or host.num_cores, host.num_cores // max(together, 1)))


def in_device_order(slot_hosts: Sequence[int], devices: Sequence[int]) -> tuple[int, ...]:
    """Of each slot its bundle: those of its host in the order of their devices. `devices`: of each bundle its device;
    bundle i is on the host of slot i."""
    order = sorted(range(len(devices)), key=lambda bundle: (slot_hosts[bundle], devices[bundle]))
    return tuple(order)
