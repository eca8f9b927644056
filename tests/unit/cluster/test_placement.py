"""Law: neighbours are on one host, nothing is used twice, and hosts that cannot give what is asked are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from slime.cluster import host_actor
from slime.cluster.hosts import bundles_of, by_number, host_of_node, num_hosts_that_fit
from slime.cluster.placement import EngineDemand, Host, PlacementPlan, in_device_order, plan_placement
from slime.core.errors import ConfigError
from slime.settings import parse_args


def hosts(*slots: int, cores: int = 8) -> list[Host]:
    """Hosts with so many slots; the driver's is the first."""
    return [Host(f"h{i}", f"10.0.0.{i + 1}", n, cores, f"node{i}") for i, n in enumerate(slots)]


def plan(*on: int, nodes: int = 1, per_node: int = 1, rollout: int = 1, engine: int = 1, **more: Any) -> PlacementPlan:
    """A plan on hosts with so many slots, for engines of `engine` slots that have `rollout` together."""
    demands = [EngineDemand(engine)] * (rollout // engine)
    given: dict[str, Any] = {"colocate": False, "hosts": hosts(*on), "engines": demands, **more}
    return plan_placement(num_nodes=nodes, num_per_node=per_node, **given)


def test_a_run_that_fits_the_drivers_host_meets_on_loopback() -> None:
    found = plan(4, 4, per_node=2, rollout=2)
    assert not found.several_hosts and {found.address_of(s) for s in range(4)} == {"127.0.0.1"}
    assert found.train_slots == (0, 1) and [e.slots for e in found.engines] == [(2,), (3,)]


def test_trainer_and_engine_on_hosts_of_their_own() -> None:
    found = plan(1, 1)
    assert found.several_hosts
    assert found.address_of(found.train_slots[0]) == "10.0.0.1"
    assert found.address_of(found.engines[0].slots[0]) == "10.0.0.2"


def on_cluster(model: Path, folder: Path) -> list[str]:
    """The flags of a run on a Ray cluster."""
    return [
        *("--hf-checkpoint", str(model), "--rollout-batch-size", "16", "--num-rollout", "1", "--rm-type", "math"),
        *("--data-source-path", "a.b", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8"),
        *("--ray-address", "10.0.0.1:6379", "--run-dir", str(folder / "run")),
    ]


@pytest.mark.parametrize(
    ("flags", "bundles"),
    [
        ("--actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate", [8, 8]),
        ("--actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus 24", [8, 8, *[1] * 8]),
        ("--actor-num-gpus-per-node 2 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4", [2, 2, 2, 2, 2]),
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2", [4, 2]),
    ],
)
def test_an_autoscaler_is_asked_for_what_the_plan_takes(
    flags: str, bundles: list[int], tiny_qwen3: Path, tmp_path: Path
) -> None:
    """Law: one bundle for each training host, and for each engine, or part of it on a host, that shares no slot."""
    for device, units in (("cpu", ("CPU",)), ("cuda", ("GPU", "CPU"))):
        args = parse_args([*on_cluster(tiny_qwen3, tmp_path), "--device", device, *flags.split()])
        assert bundles_of(args) == [{unit: float(size) for unit in units} for size in bundles]


@pytest.mark.parametrize(
    ("flags", "slots", "fits"),
    [
        ("--min-actor-num-nodes 1", (2, 2, 2), 3),
        ("--min-actor-num-nodes 1", (2, 1), 1),
        ("--min-actor-num-nodes 2", (2,), None),
        ("--min-actor-num-nodes 1", (1, 1), None),
        ("--min-actor-num-nodes 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", (2, 2, 2), 2),
        ("--min-actor-num-nodes 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", (2,), None),
        ("", (2, 2, 2), None),
    ],
)
def test_a_restart_takes_as_many_hosts_as_there_are(
    flags: str, slots: tuple[int, ...], fits: int | None, tiny_qwen3: Path, tmp_path: Path
) -> None:
    """Law: no fewer than --min-actor-num-nodes, and only a number that the parallel sizes divide."""
    size = "--actor-num-nodes 4 --actor-num-gpus-per-node 2 --colocate"
    restarts = f"--max-restarts 1 --save {tmp_path} --load {tmp_path} --save-interval 1"
    args = parse_args([*on_cluster(tiny_qwen3, tmp_path), *f"{size} {restarts} {flags}".split()])
    assert num_hosts_that_fit(args, hosts(*slots)) == fits


def test_training_nodes_are_different_hosts() -> None:
    found = plan(4, 4, nodes=2, per_node=2, rollout=2)
    assert [found.slot_hosts[s] for s in found.train_slots] == [0, 0, 1, 1]
    assert not found.split_groups(2) and found.split_groups(4)
    with pytest.raises(ConfigError, match=r"2 free slots each, but .* are 4 on h0 \(10.0.0.1\), 1 on h1"):
        plan(4, 1, nodes=2, per_node=2)


def test_an_engine_that_one_host_can_hold_never_straddles() -> None:
    found = plan(3, 4, per_node=3, rollout=4, engine=4)
    assert {found.slot_hosts[s] for s in found.engines[0].slots} == {1}
    with pytest.raises(ConfigError, match="engine 1 of 2 needs 2 slots"):
        plan(3, 3, rollout=4, engine=2, per_node=2)


def test_an_engine_wider_than_any_host_takes_equal_parts_of_the_fewest() -> None:
    found = plan(4, 4, 4, 2, per_node=2, rollout=8, engine=8)
    assert [found.slot_hosts[s] for s in found.train_slots] == [2, 2] and len(found.hosts) == 3
    with pytest.raises(ConfigError, match="cannot be split evenly"):
        plan(4, 3, per_node=1, rollout=8, engine=8)
    found = plan(per_node=2, rollout=4, engine=4, hosts=hosts(3, 3, 2))
    parts = found.engines[0].parts
    assert [len(part) for part in parts] == [2, 2] and [found.slot_hosts[part[0]] for part in parts] == [0, 1]


def test_a_wide_host_that_is_taken_does_not_keep_an_engine_from_two_whole_ones() -> None:
    found = plan(16, 8, 8, per_node=16, rollout=16, engine=16)
    assert [found.slot_hosts[slot] for slot in found.train_slots] == [0] * 16
    assert [len(part) for part in found.engines[0].parts] == [8, 8]
    assert plan(16, 8, 8, per_node=1, rollout=16, engine=16, hosts=hosts(16, 8, 8, 1)).engines[0].parts == (
        tuple(range(16)),
    ), "one that has room for it goes first"


@pytest.mark.parametrize(
    ("free", "most", "num_slots", "says"),
    [
        (
            {"GPU": 8.0, "CPU": 2.0},
            None,
            2,
            "2 on a (10.0.0.9) (8 GPUs are free, but each slot also takes a CPU",
        ),
        ({"GPU": 8.0, "CPU": 64.0}, 2, 2, "slots are 2 on a (10.0.0.9) (--num-gpus-per-node 2)"),
        ({"GPU": 2.0, "CPU": 64.0}, 4, 2, "slots are 2 on a (10.0.0.9); lower"),
        ({"CPU": 3.0}, None, 0, "slots are 0 on a (10.0.0.9); lower"),
        ({}, None, 0, "slots are 0 on a (10.0.0.9); lower"),
    ],
)
def test_gpus_that_a_host_holds_back_are_told_with_the_reason(
    free: dict[str, float], most: int | None, num_slots: int, says: str
) -> None:
    node = {"NodeManagerHostname": "a", "NodeManagerAddress": "10.0.0.9", "NodeID": "1", "Resources": {"CPU": 2.0}}
    host = host_of_node(node, free, device="cuda", most=most)
    assert host.num_slots == num_slots
    with pytest.raises(ConfigError) as refused:
        plan(hosts=[host], per_node=4)
    assert says in str(refused.value)


def test_hosts_are_in_the_order_of_their_addresses() -> None:
    addresses = ["10.0.0.9", "10.0.0.10", "fd00::9", "fd00::10", "fd00::a:1"]
    assert sorted(reversed(addresses), key=by_number) == addresses


def test_a_gpu_is_what_its_host_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: never a number that somebody else chose; and no two slots are on one."""
    worker = ray._private.worker.global_worker
    monkeypatch.setattr(worker, "original_visible_accelerator_ids", {"GPU": ["GPU-b", "MIG-a/1"]})
    for ids, own in (([3], (3, "3")), (["MIG-a/1"], (1, "MIG-a/1")), (["GPU-b"], (0, "GPU-b"))):
        monkeypatch.setattr(host_actor.ray, "get_gpu_ids", lambda ids=ids: ids)
        assert host_actor._own_device() == own
    one, other = hosts(2, 2)
    host_actor._require_different([one, one, other], ["GPU-a", "GPU-b", "GPU-a"])
    with pytest.raises(ConfigError, match=r"more than one slot has GPU GPU-a of h0 "):
        host_actor._require_different([one, one, other], ["GPU-a", "GPU-a", "GPU-b"])


def test_colocated_engines_wider_than_a_host_share_whole_ones() -> None:
    found = plan(nodes=4, per_node=2, rollout=8, engine=4, colocate=True, hosts=hosts(2, 2, 2, 2))
    assert [e.parts for e in found.engines] == [((0, 1), (2, 3)), ((4, 5), (6, 7))]
    assert all(e.colocated for e in found.engines)


def test_engines_beyond_the_training_slots_have_their_own() -> None:
    found = plan(nodes=2, per_node=2, rollout=6, colocate=True, hosts=hosts(3, 3))
    assert found.train_slots == (0, 1, 3, 4)
    assert [(e.slots, e.colocated) for e in found.engines[:4]] == [((s,), True) for s in (0, 1, 3, 4)]
    assert [(e.slots, e.colocated) for e in found.engines[4:]] == [((2,), False), ((5,), False)]
    assert found.train_threads[0] == 2 and found.engines[0].num_threads == 2 and found.engines[4].num_threads == 2


def test_engines_of_several_widths_and_slots_that_are_kept_free() -> None:
    demands = [EngineDemand(2), EngineDemand(1, runs=False), EngineDemand(4)]
    found = plan(engines=demands, hosts=hosts(8))
    assert [(e.index, e.slots) for e in found.engines] == [(0, (1, 2)), (1, (4, 5, 6, 7))]
    assert found.num_slots == 8 and found.engines[0].num_threads == 8 // 7


def test_the_largest_room_is_kept_for_engines() -> None:
    found = plan(8, 4, per_node=4, rollout=8, engine=8)
    assert [found.slot_hosts[s] for s in found.train_slots] == [1] * 4
    assert {found.slot_hosts[s] for s in found.engines[0].slots} == {0}


def test_colocated_engines_share_the_slots_of_one_host() -> None:
    found = plan(3, 3, nodes=2, per_node=3, rollout=4, engine=2, colocate=True, hosts=hosts(3, 3))
    assert next(e.slots for e in found.engines) == (0, 1)
    assert found.train_slots == (0, 1, 2, 3, 4, 5)


def test_colocated_engines_that_would_straddle_are_refused() -> None:
    with pytest.raises(ConfigError, match="only 2 fit"):
        plan(3, 3, nodes=2, per_node=3, rollout=6, engine=2, colocate=True)


def test_a_driver_without_slots_is_a_host_of_the_run() -> None:
    found = plan(0, 2)
    assert [h.name for h in found.hosts] == ["h0", "h1"] and found.slot_hosts == (1, 1)
    assert found.several_hosts, "the rollout side is on the driver's host and has to reach the engines"


def test_threads_are_of_the_host_that_computes() -> None:
    small, large = Host("a", "10.0.0.1", 1, 2), Host("b", "10.0.0.2", 2, 64)
    found = plan(hosts=[small, large], rollout=2)
    assert found.train_threads == (2,) and [e.num_threads for e in found.engines] == [32, 32]
    assert plan(hosts=[small, large], rollout=2, max_threads=1).engines[0].num_threads == 1
    shared = plan(hosts=[Host("a", "10.0.0.1", 2, 8)], per_node=2, rollout=1, colocate=True)
    assert shared.train_threads == (4, 4) and shared.engines[0].num_threads == 8


@given(
    free=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    nodes=st.integers(0, 3),
    per_node=st.integers(1, 4),
    engine=st.sampled_from([1, 2, 4]),
    engines=st.integers(0, 5),
    colocate=st.booleans(),
)
def test_any_plan_keeps_the_invariants(
    free: list[int], nodes: int, per_node: int, engine: int, engines: int, colocate: bool
) -> None:
    colocate = colocate and nodes > 0
    asked: dict[str, Any] = {"nodes": nodes, "per_node": per_node, "rollout": engine * engines, "engine": engine}
    try:
        found = plan(*free, **asked, colocate=colocate)
    except ConfigError:
        return
    assert list(found.slot_hosts) == sorted(found.slot_hosts)
    by_host = [found.slot_hosts.count(h) for h in range(len(found.hosts))]
    assert all(n <= host.num_slots for n, host in zip(by_host, found.hosts, strict=True))
    taken = [slot for placed in found.engines for slot in placed.slots]
    assert len(set(taken)) == len(taken) and len(set(found.train_slots)) == nodes * per_node
    for placed in found.engines:
        assert (set(placed.slots) <= set(found.train_slots)) if placed.colocated else True
        assert placed.colocated or not set(placed.slots) & set(found.train_slots)
        assert all(len({found.slot_hosts[s] for s in part}) == 1 for part in placed.parts)
        assert len({len(part) for part in placed.parts}) == 1
        on = {found.hosts[found.slot_hosts[slot]].num_slots for slot in placed.slots}
        assert len(placed.parts) == 1 or engine > (per_node if placed.colocated else max(on))
    assert colocate or not any(placed.colocated for placed in found.engines)
    shared = sum(len(placed.slots) for placed in found.engines if placed.colocated)
    assert not colocate or shared == min(len(taken), nodes * per_node)
    assert not found.split_groups(per_node)
    again = plan(hosts=found.hosts, **asked, colocate=colocate)
    assert again == found, "among its own hosts the plan is the same"


def test_slots_of_a_host_follow_its_devices() -> None:
    assert in_device_order((0, 0, 0, 1, 1), (2, 0, 1, 5, 4)) == (1, 2, 0, 4, 3)
