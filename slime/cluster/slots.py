"""Reserves the slots of a placement plan in Ray. Each slot is one bundle on its planned host.

On multi-GPU hosts, a probe in each bundle reports its GPU, and slots are numbered in device order.

Invariants
1. Within a host, slots are in device order, so consecutive ranks use adjacent devices.
2. The slots of a host have different devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from slime.cluster.placement import Host, PlacementPlan, in_device_order
from slime.cluster.waiting import wait_for
from slime.core.errors import START_FLAG, ConfigError

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
