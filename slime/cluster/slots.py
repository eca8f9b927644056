"""The slots of a plan as Ray reserves them: one bundle each, on the host that the plan names, in the order of devices.

Consumes a plan. Produces the options under which an actor gets a slot, and which GPU that is. Waits for Ray to reserve
the bundles, and on hosts with several GPUs for each to say which one it has; nobody wakes it.

Invariant: slot i of a host has a device with a lower number than slot i + 1, so neighbours in rank are neighbours in
the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from slime.cluster.placement import Host, PlacementPlan, in_device_order
from slime.cluster.waiting import wait_for

ON_HOST = 0.001
"""Of the resource by which Ray knows a host: enough to name it, and there are enough for all bundles."""
PROBE_SHARE = 0.1
NAME = "slots"
"""Of the reservation, in the run's own namespace."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a plan, reserved."""

    group: Any
    """Ray's placement group."""
    unit: str
    """"GPU" or "CPU"."""
    bundles: tuple[int, ...]
    """Of each slot its bundle in the group."""
    devices: tuple[int, ...] | None
    """Of each slot the number of its GPU on its host; None on a CPU, and where no host gives more than one."""

    def options(self, slot: int, share: float) -> dict[str, Any]:
        """Ray's options for an actor on a slot that takes this share of it."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self.bundles[slot] if self.bundles else 0
        )
        resources = {"num_cpus": share} if self.unit == "CPU" else {"num_cpus": share, "num_gpus": share}
        return {**resources, "scheduling_strategy": strategy}


def on_node(node_id: str | None) -> dict[str, Any]:
    """Ray's options for an actor that runs on this node or not at all; None: anywhere."""
    return {} if node_id is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


def reserve(plan: PlacementPlan, *, device: str, limit_s: float) -> Slots:
    """Reserves the slots of the plan."""
    unit = "GPU" if device == "cuda" else "CPU"
    on = [plan.hosts[h] for h in plan.slot_hosts]
    group = placement_group([_bundle(unit, host) for host in on] or [{"CPU": 1.0}], strategy="PACK", name=NAME)
    told = ", ".join(f"{on.count(host)} on {host}" for host in plan.hosts if host in on)
    wait_for([group.ready()], for_what=f"slots with one {unit} each: {told or 'one'}", limit_s=limit_s)
    bundles: tuple[int, ...] = tuple(range(plan.num_slots))
    if unit == "CPU" or len(set(plan.slot_hosts)) == plan.num_slots:
        return Slots(group, unit, bundles, None)
    devices = _devices(group, plan.num_slots, limit_s)
    bundles = in_device_order(plan.slot_hosts, devices)
    return Slots(group, unit, bundles, tuple(devices[bundle] for bundle in bundles))


def give_back() -> None:
    """Ends the reservation, if there is one, and with it the actors on its slots: Ray knows that it was meant."""
    try:
        group = get_placement_group(NAME)
    except ValueError:  # the run did not get that far
        return
    remove_placement_group(group)


def _bundle(unit: str, host: Host) -> dict[str, float]:
    needs = {"CPU": 1.0} if unit == "CPU" else {"GPU": 1.0, "CPU": 1.0}
    return needs if host.node_id is None else {**needs, f"node:{host.address}": ON_HOST}


def _devices(group: Any, num_slots: int, limit_s: float) -> list[int]:
    """The number of each bundle's GPU on its host."""
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
    return wait_for(calls, for_what="each slot to say which GPU it has", limit_s=limit_s)


def _own_device() -> int:
    (device,) = ray.get_gpu_ids()
    return int(device) if str(device).isdigit() else 0  # by their UUID, GPUs have no order
