"""Law: what engines, routers and senders are told is what settings, topology and placement say, each of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.cluster import rank_weight_sync, ray_engines
from slime.cluster.actors import EngineInfo
from slime.cluster.engine_actor import Node
from slime.cluster.engines import Engines
from slime.cluster.guarded_hosts import GuardedHosts
from slime.cluster.placement import EngineDemand, Host, PlacementPlan, plan_placement
from slime.cluster.rank_weight_sync import RankWeightSync
from slime.cluster.ray_engines import RayEngines
from slime.core.layout import ONE_RANK, EngineLayout
from slime.core.topology import Worker
from slime.fleet.engine import FROZEN, POLICY, State
from slime.settings import Args
from slime.settings.topology import topology_of
from slime.weights.outgoing import Whole
from tests.support.rollout import rollout_args, write_checkpoint_stub
from tests.support.weights import FakeEngine, FakeWire, model

TP2 = EngineLayout(tp_size=2)
KEY = "the key of the run"


class Actors:
    """Notes what actors of engines are made of, and on which slots."""

    def __init__(self) -> None:
        self.made: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []

    def options(self, *, slot: int) -> Any:
        return SimpleNamespace(remote=lambda *given, **named: self._make(slot, given, named))

    def _make(self, slot: int, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self.made.append((slot, given, named))
        return SimpleNamespace(meeting_point=SimpleNamespace(remote=lambda: f"meet {given[0]}"))


class Slots:
    """Slot i has GPU 10 + i of its host."""

    devices = tuple(range(10, 20))

    def options(self, slot: int, share: float) -> dict[str, Any]:
        return {"slot": slot}


@pytest.fixture
def args(tmp_path: Path) -> Args:
    """A policy in pairs, behind a slot that is kept free, and a judge whose engine is on two hosts."""
    judge = write_checkpoint_stub(tmp_path / "judge")
    own = {"log_level": "debug", "max_running_requests": 3}
    kinds = [{"worker_type": "placeholder"}, {"worker_type": "prefill", "overrides": own}, {"worker_type": "decode"}]
    groups = [{"num_gpus": 1, "num_gpus_per_engine": 1, **kind} for kind in kinds]
    models = [{"name": "actor", "server_groups": groups}]
    models.append({"name": "judge", "model_path": str(judge), "server_groups": [{"num_gpus": 2}]})
    file = tmp_path / "fleet.yaml"
    file.write_text(json.dumps({"sglang": models}))
    flags = ("--sglang-config", str(file), "--rollout-num-gpus-per-engine", "2", "--rollout-seed", "7")
    return rollout_args(tmp_path, *flags, "--sglang-max-running-requests", "9")


@pytest.fixture
def plan(args: Args) -> PlacementPlan:
    """Every host has one slot."""
    demands = [EngineDemand(wanted.num_gpus, wanted.runs) for wanted in topology_of(args).wanted()]
    hosts = [Host(f"h{i}", f"10.0.0.{i}", 1, 4, f"node{i}") for i in range(6)]
    return plan_placement(num_nodes=1, num_per_node=1, engines=demands, colocate=False, hosts=hosts)


def engines_of(
    args: Args, plan: PlacementPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[RayEngines, Actors]:
    actors, slots, hosts = Actors(), Slots(), GuardedHosts(SimpleNamespace(tend=lambda: None))  # type: ignore[arg-type]
    monkeypatch.setattr(ray_engines, "EngineActor", actors)
    return RayEngines(args, plan, slots, hosts, log_dir=tmp_path, api_key=KEY), actors  # type: ignore[arg-type]


def test_each_engine_gets_what_its_group_and_its_place_say(
    args: Args, plan: PlacementPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, actors = engines_of(args, plan, tmp_path, monkeypatch)
    policy, judge = str(args.hf_checkpoint), str(tmp_path / "judge")
    told = []
    for slot, (name, spec, log_dir, _, host, node, *meeting), named in actors.made:
        own = (spec.model_path, spec.worker, spec.layout, spec.extra.get("max_running_requests"), spec.random_seed)
        told.append((name, slot, host, node, meeting, spec.gpu_ids, own, named["takes_weights"]))
        assert spec.api_key == KEY and log_dir == str(tmp_path)
    assert told == [
        ("0", 2, "10.0.0.2", None, [], (12,), (policy, Worker.PREFILL, ONE_RANK, 3, 7), True),
        ("1", 3, "10.0.0.3", None, [], (13,), (policy, Worker.DECODE, ONE_RANK, 9, 8), True),
        ("2", 4, "10.0.0.4", Node(0, 2, (14,)), [], None, (judge, Worker.REGULAR, TP2, 9, 9), False),
        ("2_node1", 5, "10.0.0.5", Node(1, 2, (15,)), ["meet 2"], None, (judge, Worker.REGULAR, TP2, 9, 9), False),
    ]
    known = [(e.slots, e.model, e.role, e.worker, e.layout, e.host) for e in port.engines()]
    assert known == [
        ((2,), "actor", POLICY, Worker.PREFILL, ONE_RANK, "10.0.0.2"),
        ((3,), "actor", POLICY, Worker.DECODE, ONE_RANK, "10.0.0.3"),
        ((4, 5), "judge", FROZEN, Worker.REGULAR, TP2, "10.0.0.4"),
    ]


def test_the_rollout_side_and_the_senders_know_each_engine_as_what_it_is(
    args: Args, plan: PlacementPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was started again is another one for the senders, and the rollout side forgets its old address."""
    port, _ = engines_of(args, plan, tmp_path, monkeypatch)
    said: list[Any] = []
    calls = {name: SimpleNamespace(remote=lambda *a, n=name: said.append((n, *a))) for name in ("admit", "dismiss")}
    rollout = SimpleNamespace(**calls)
    monkeypatch.setattr("slime.cluster.engines.wait_for", lambda *a, **k: [])
    monkeypatch.setattr("slime.cluster.engines.ray.wait", lambda refs, **k: (refs, []))
    fleet = Engines(args, port, rollout, KEY, port._hosts)
    for index in range(3):
        fleet.up(index, f"http://{index}")
    fleet.end_sync(fleet.begin_sync(), 1)
    assert sorted(said) == [
        ("admit", "actor", ["http://0"], Worker.PREFILL),
        ("admit", "actor", ["http://1"], Worker.DECODE),
        ("admit", "judge", ["http://2"], Worker.REGULAR),
    ]
    said.clear()
    fleet._supervisor.lost(fleet.members[2], "gone")
    fleet._supervisor.lost(fleet.members[1], "gone")
    assert said == [("dismiss", "judge", ["http://2"]), ("dismiss", "actor", ["http://1"])]
    fleet.members.change(1, State.STARTING, incarnation=1)
    fleet.up(1, "http://1")
    infos = fleet.infos(fleet.members.engines[:2])
    assert infos == [
        EngineInfo(0, "http://0", ONE_RANK, (2,), KEY, 0),
        EngineInfo(1, "http://1", ONE_RANK, (3,), KEY, 1),
    ]


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one training rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_rank_sends_as_the_settings_say_and_to_each_engine_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: by the mode and in buckets of the settings, the trainer's version, to the process that there is now."""
    flags = ("--fully-async", "--pause-generation-mode", "retract", "--update-weight-buffer-size", "4096")
    args = rollout_args(tmp_path, *flags, "--sglang-dtype", "float32", synchronous=False)
    (table, state), wire = model(), FakeWire()
    made: list[tuple[FakeEngine, float, str | None]] = []
    versions: list[int] = []

    class Engine(FakeEngine):
        def update_weights_from_tensor(self, payloads: Any, **update: Any) -> None:
            versions.append(update["weight_version"])
            super().update_weights_from_tensor(payloads, **update)

    def control(url: str, layout: EngineLayout, timeout_s: float, api_key: str | None = None) -> FakeEngine:
        made.append((Engine(url, table, wire, layout), timeout_s, api_key))
        return made[-1][0]

    monkeypatch.setattr(rank_weight_sync, "HttpEngineControl", control)
    monkeypatch.setattr(rank_weight_sync, "serialize_bucket", wire.serialize)
    noted: list[str] = []
    backend: Any = SimpleNamespace(
        outgoing=lambda dtype: Whole(table, state.items()),
        sight=SimpleNamespace(digests=lambda dtype, digest: {}),
        device=torch.device("cpu"),
        weight_version=5,
        require_weights=lambda: noted.append("asked"),
        note_synced=lambda: noted.append("synced"),
    )
    rank = RankWeightSync(args, backend, rank=0, slots=[0], address="127.0.0.1")
    old, new = (EngineInfo(0, "http://a", ONE_RANK, (1,), KEY, incarnation) for incarnation in (0, 1))
    metrics = rank.sync_weights([old])
    engine, limit_s, key = made[0]
    num_bytes = sum(tensor.numel() * 4 for tensor in state.values())
    updates = engine.log.count("update")
    assert engine.log == ["pause retract", *["update"] * updates, "checksums", "resume"]
    assert num_bytes / 4096 <= updates < num_bytes / 4096 * 3 and set(versions) == {5}
    assert (limit_s, key) == (args.weight_sync_timeout_s, KEY) and noted == ["asked", "synced"]
    assert metrics["perf/update_weights_bytes"] == num_bytes
    rank.sync_weights([old])
    assert len(made) == 1
    rank.sync_weights([new])
    assert len(made) == 2, "another process is at that address"
    rank.give_up("http://a", 0)
    rank.sync_weights([new])
    rank.close()
