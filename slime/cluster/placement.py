"""Assigns processes to the slots of hosts. The functions are pure and run before any process is placed.

A *slot* is one GPU, or one CPU (as counted by Ray) on a host without GPUs. Training uses `num_nodes` hosts with
`num_per_node` slots each. An engine uses slots of a single host or, if no host is large enough, the same number of
slots on several hosts. With `colocate`, engines share the slots of training ranks until all of these are shared; the
remaining engines get their own slots.

Invariants
1. Every training rank has exactly one slot. Every engine has consecutive slots on each of its hosts.
2. Slots are numbered host by host, so consecutive training ranks are on the same host as far as possible.
3. A slot has at most one training rank and one engine rank, and has both only with `colocate`. An engine shares either
   all of its slots or none.
4. Processes that compute on a host at the same time have no more threads in total than the host has cores, unless there
   are more processes than cores. Each process has at least one thread.
5. Hosts are selected greedily by best fit, so planning again with only the selected hosts results in the same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from slime.core.errors import ConfigError
from slime.core.processes import LOOPBACK


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    """Display name."""
    address: str
    """Address at which other hosts can reach this host."""
    num_slots: int
    """Number of slots that the run may use."""
    num_cores: int
    node_id: str | None = None
    """Ray node id. None before Ray has started."""
    held_back: str = ""
    """Why the run cannot use all free GPUs of the host, for messages. Empty if it can."""

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True, slots=True)
class EngineDemand:
    num_slots: int
    runs: bool = True
    """If False, the slots are reserved but no engine starts."""


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    index: int
    parts: tuple[tuple[int, ...], ...]
    """[engine hosts] slots on each host, in rank order."""
    colocated: bool
    """Whether the engine shares its slots with training ranks."""
    num_threads: int
    """CPU threads per engine rank. Only used on CPU."""

    @property
    def slots(self) -> tuple[int, ...]:
        """All slots of the engine, in rank order."""
        return tuple(slot for part in self.parts for slot in part)


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    hosts: tuple[Host, ...]
    """The driver's host, even if none of its slots are used, followed by all other hosts with used slots."""
    slot_hosts: tuple[int, ...]
    """[slots] index of the slot's host in `hosts`, ascending."""
    train_slots: tuple[int, ...]
    """[training ranks] slot of each rank. Empty without training."""
    engines: tuple[EnginePlacement, ...]
    train_threads: tuple[int, ...]
    """[training ranks] CPU threads of each rank. Used for training on CPU and for an optimizer in host memory."""

    @property
    def num_slots(self) -> int:
        return len(self.slot_hosts)

    @property
    def several_hosts(self) -> bool:
        return len(self.hosts) > 1

    def address_of(self, slot: int) -> str:
        """Returns the address that processes in this slot listen on."""
        return self.hosts[self.slot_hosts[slot]].address if self.several_hosts else LOOPBACK

    def split_groups(self, size: int) -> bool:
        """Returns whether any group of `size` consecutive training ranks spans several hosts."""
        hosts = [self.slot_hosts[slot] for slot in self.train_slots]
        return any(len(set(hosts[i : i + size])) > 1 for i in range(0, len(hosts), size))


@dataclass(frozen=True, slots=True)
class _Place:
    """The hosts of one engine. Each contributes the same number of slots."""

    demand: EngineDemand
    on: tuple[int, ...]
    shared: bool

    @property
    def width(self) -> int:
        return self.demand.num_slots // len(self.on)


def plan_placement(
    *,
    num_nodes: int,
    num_per_node: int,
    engines: Sequence[EngineDemand],
    colocate: bool,
    hosts: Sequence[Host],
    max_threads: int | None = None,
) -> PlacementPlan:
    """Places `num_nodes` x `num_per_node` training ranks, then the engines in order.

    `hosts`: the driver's host must come first. `num_nodes`: 0 without training. `max_threads`: limit per process.
    Raises `ConfigError` if the hosts have too few slots, or if an engine would share only some of its slots.
    """
    free = [host.num_slots for host in hosts]
    train_on = _training_hosts(num_nodes, num_per_node, free, hosts)
    places: list[_Place] = []
    if colocate and train_on:
        places = _shared_places(engines, num_per_node, train_on)
    for demand in engines[len(places) :]:
        places.append(_Place(demand, _own_hosts(len(places), engines, free, hosts), shared=False))
    used = sorted({0, *train_on, *(h for place in places for h in place.on)})
    return _numbered(
        tuple(hosts[h] for h in used),
        [used.index(h) for h in train_on for _ in range(num_per_node)],
        [dataclasses.replace(place, on=tuple(used.index(h) for h in place.on)) for place in places],
        max_threads=max_threads,
    )


def _training_hosts(num_nodes: int, num_per_node: int, free: list[int], hosts: Sequence[Host]) -> list[int]:
    """Selects the training hosts, subtracts their slots from `free`, and returns their indices in order."""
    able = sorted((n, h) for h, n in enumerate(free) if n >= num_per_node)
    if len(able) < num_nodes:
        raise ConfigError(
            f"--actor-num-nodes {num_nodes} and --actor-num-gpus-per-node {num_per_node} need {num_nodes} "
            f"host{'s' * (num_nodes > 1)} with {num_per_node} free slots each, but {_told(free, hosts)}; lower one of "
            "the flags, or add hosts to the Ray cluster"
        )
    chosen = sorted(h for _, h in able[:num_nodes])
    for h in chosen:
        free[h] -= num_per_node
    return chosen


def _shared_places(engines: Sequence[EngineDemand], num_per_node: int, train_on: list[int]) -> list[_Place]:
    """Places engines on training slots until all training slots are shared."""
    room = dict.fromkeys(train_on, num_per_node)
    places: list[_Place] = []
    for demand in engines:
        if not any(room.values()):
            break
        num_hosts = max(1, demand.num_slots // num_per_node)
        width = demand.num_slots // num_hosts
        on = [h for h in train_on if room[h] >= width][:num_hosts]
        if len(on) < num_hosts or width * num_hosts != demand.num_slots:
            sizes = sorted({engine.num_slots for engine in engines})
            raise ConfigError(
                f"--colocate cannot place {len(engines)} engines of {' and '.join(map(str, sizes))} slots on "
                f"{len(train_on)} hosts with {num_per_node} training slots each; only {len(places)} fit. An engine "
                "must fit on one host or span complete hosts, and shares all of its slots with training or none. "
                f"Set --rollout-num-gpus-per-engine to a divisor or a multiple of {num_per_node}"
            )
        for h in on:
            room[h] -= width
        places.append(_Place(demand, tuple(on), shared=True))
    return places


def _own_hosts(index: int, engines: Sequence[EngineDemand], free: list[int], hosts: Sequence[Host]) -> tuple[int, ...]:
    """Selects the fullest host with room for engine `index`, or else as few hosts as possible.

    Subtracts the slots from `free` and returns the indices of the hosts.
    """
    size = engines[index].num_slots
    for num_hosts in (n for n in range(1, size + 1) if size % n == 0):
        narrow = (num_hosts == 1 or host.num_slots < size for host in hosts)
        able = sorted(
            (n, h) for (h, n), may in zip(enumerate(free), narrow, strict=True) if may and n >= size // num_hosts
        )
        if len(able) >= num_hosts:
            chosen = tuple(sorted(h for _, h in able[:num_hosts]))
            for h in chosen:
                free[h] -= size // num_hosts
            return chosen
    raise ConfigError(
        f"engine {index} of {len(engines)} needs {size} slots, but after placing the training ranks and earlier "
        f"engines, no host has that many, and they cannot be split evenly; {_told(free, hosts)}; lower "
        "--rollout-num-gpus or --rollout-num-gpus-per-engine, or add hosts to the Ray cluster"
    )


def _told(free: list[int], hosts: Sequence[Host]) -> str:
    each = [
        f"{n} on {host}" + f" ({host.held_back})" * bool(host.held_back) for n, host in zip(free, hosts, strict=True)
    ]
    return "the free slots are " + ", ".join(each)


def _numbered(
    hosts: tuple[Host, ...], ranks: list[int], places: Sequence[_Place], *, max_threads: int | None
) -> PlacementPlan:
    """Numbers the slots host by host: first the slots of training ranks, then those used only by engines.

    `ranks`: [training ranks] host index.
    """
    slot_hosts: list[int] = []
    rank_slots: dict[int, int] = {}
    train_threads: dict[int, int] = {}
    parts: list[list[tuple[int, ...]]] = [[] for _ in places]
    threads: list[list[int]] = [[] for _ in places]
    for h, host in enumerate(hosts):
        ours, first = [r for r, at in enumerate(ranks) if at == h], len(slot_hosts)
        here = [p for p, place in enumerate(places) if h in place.on]
        rank_slots |= {rank: first + i for i, rank in enumerate(ours)}
        next_slot = {True: first, False: first + len(ours)}
        for p in here:
            begin, width = next_slot[places[p].shared], places[p].width
            parts[p].append(tuple(range(begin, begin + width)))
            next_slot[places[p].shared] += width
        slot_hosts += [h] * (next_slot[False] - first)
        # Training alternates with the engines that share its slots, so both can use the same cores. Engines with their
        # own slots run concurrently with both.
        beside = sum(places[p].width for p in here if places[p].demand.runs and not places[p].shared)
        sharing = sum(places[p].width for p in here if places[p].demand.runs and places[p].shared)
        train_threads |= dict.fromkeys(ours, _threads(host, len(ours) + beside, max_threads))
        for p in here:
            together = sharing if places[p].shared else max(len(ours), sharing)
            threads[p].append(_threads(host, together + beside, max_threads))
    running = [p for p, place in enumerate(places) if place.demand.runs]
    return PlacementPlan(
        hosts,
        tuple(slot_hosts),
        tuple(rank_slots[r] for r in range(len(ranks))),
        tuple(EnginePlacement(i, tuple(parts[p]), places[p].shared, min(threads[p])) for i, p in enumerate(running)),
        tuple(train_threads[r] for r in range(len(ranks))),
    )


def _threads(host: Host, together: int, most: int | None) -> int:
    """Returns the number of threads per process if `together` processes compute on the host concurrently."""
    return max(1, min(most or host.num_cores, host.num_cores // max(together, 1)))


def in_device_order(slot_hosts: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    """Returns [slots] the bundle of each slot, so that the slots of each host are in device order.

    `places`: [bundles] position of the bundle's device on its host. Bundle i is on the host of slot i.
    """
    order = sorted(range(len(places)), key=lambda bundle: (slot_hosts[bundle], places[bundle]))
    return tuple(order)
