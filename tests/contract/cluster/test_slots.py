"""Law: neighbouring slots of a host have neighbouring devices, in whatever order Ray gives them to bundles."""

from __future__ import annotations

import pytest

from tests.support.ray_program import output_of

PROGRAM = """
import ray
from slime.cluster.placement import EngineDemand, Host, plan_placement
from slime.cluster.host_actor import give_back, on_node, reserve

ray.init(address="local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False)
node = ray.nodes()[0]
host = Host("a", node["NodeManagerAddress"], 4, 4, node["NodeID"])
plan = plan_placement(num_nodes=1, num_per_node=3, engines=[EngineDemand(1)], colocate=False, hosts=[host])
slots = reserve(plan, device="cuda", limit_s=60)
on_slot = slots.options


@ray.remote
class Seat:
    def device(self):
        return str(ray.get_gpu_ids()[0])


seats = [Seat.options(**on_slot(slot, 0.4)).remote() for slot in range(plan.num_slots)]
seats.append(Seat.options(**on_slot(0, 0.2)).remote())
print("named", ",".join(slots.devices))
print("devices", ",".join(ray.get([seat.device.remote() for seat in seats])))
give_back()
give_back()
"""


@pytest.mark.slow
@pytest.mark.parametrize("visible", [None, "GPU-c,GPU-a,MIG-9,GPU-b"])
def test_slots_follow_devices_under_their_names_and_are_given_back(
    visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    printed, names = output_of(PROGRAM), (visible or "0,1,2,3").split(",")
    assert f"named {','.join(names)}\n" in printed and f"devices {','.join([*names, names[0]])}\n" in printed, printed
