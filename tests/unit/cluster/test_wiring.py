"""Law: what engines, routers and senders are told is what settings, topology and placement say, each of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.cluster import engine_actors, host_actor, rank_weight_sync, rollout_actor, start_actors, train_actor
from slime.cluster.engine_actors import Node, RayEngines
from slime.cluster.engine_tracker import WEIGHT_VERSION, EngineInfo, Engines
from slime.cluster.hosts import GuardedHosts
from slime.cluster.placement import EngineDemand, Host, PlacementPlan, plan_placement
from slime.cluster.rank_weight_sync import RankWeightSync
from slime.cluster.rollout_actor import needs_routers
from slime.core import liveness
from slime.core.errors import WeightSyncError
from slime.core.text import EngineKeys
from slime.core.topology import ONE_RANK, EngineLayout, Worker
from slime.fleet.supervisor import FROZEN, POLICY, FleetFiles, State
from slime.serving.agent_process import AgentSettings
from slime.serving.server import ServerSpec
from slime.settings import Args
from slime.settings.topology_yaml import topology_of
from tests.support.rollout import rollout_args, write_checkpoint_stub, write_prompts
from tests.support.weights import FakeEngine, FakeWire, Whole, model

TP2 = EngineLayout(tp_size=2)
KEYS = EngineKeys("the key of the run", "the key to its weights")


class Noting:
    """Notes every call of a method, by name; `remote` of a method is the method, and its answer what it was asked."""

    def __init__(self, name: str, said: list[Any], **has: Any) -> None:
        self.name, self._said = name, said
        self.__dict__.update(has)

    def __getattr__(self, method: str) -> Any:
        def note(*given: Any, **named: Any) -> str:
            self._said.append((method, self.name, *given, *named.values()))
            return f"{method} {self.name}"

        note.remote = note  # type: ignore[attr-defined]
        return note


class Actors:
    """Notes what actors of engines are made of, on which slots, and what they are asked."""

    def __init__(self) -> None:
        self.made: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []
        self.said: list[Any] = []

    def options(self, *, slot: int) -> Any:
        return SimpleNamespace(remote=lambda *given, **named: self._make(slot, given, named))

    def _make(self, slot: int, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self.made.append((slot, given, named))
        return Noting(given[0], self.said)


def plain(actor: Any) -> Any:
    """The class that Ray wraps."""
    return actor.__ray_metadata__.modified_class


class Slots:
    """Slot i has GPU-i of its host: some schedulers name GPUs by their UUIDs."""

    devices = tuple(f"GPU-{i}" for i in range(10))

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
    monkeypatch.setattr(engine_actors, "EngineActor", actors)
    monkeypatch.setattr(engine_actors, "introduce", lambda actor, process: actor)
    return RayEngines(args, plan, slots, hosts, log_dir=tmp_path, keys=KEYS), actors  # type: ignore[arg-type]


def test_each_engine_gets_what_its_group_and_its_place_say(
    args: Args, plan: PlacementPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, actors = engines_of(args, plan, tmp_path, monkeypatch)
    policy, judge = str(args.hf_checkpoint), str(tmp_path / "judge")
    told = []
    for slot, (name, spec, log_dir, _, host, node, *meeting), named in actors.made:
        own = (spec.model_path, spec.worker, spec.layout, spec.extra.get("max_running_requests"), spec.random_seed)
        told.append((name, slot, host, node, meeting, spec.gpu_ids, own, named["takes_weights"]))
        assert spec.keys == KEYS and log_dir == str(tmp_path)
    assert told == [
        ("0", 2, "10.0.0.2", None, [], ("GPU-2",), (policy, Worker.PREFILL, ONE_RANK, 3, 7), True),
        ("1", 3, "10.0.0.3", None, [], ("GPU-3",), (policy, Worker.DECODE, ONE_RANK, 9, 8), True),
        ("2", 4, "10.0.0.4", Node(0, 2, ("GPU-4",)), [], None, (judge, Worker.REGULAR, TP2, 9, 9), False),
        (
            "2_node1",
            5,
            "10.0.0.5",
            Node(1, 2, ("GPU-5",)),
            ["meeting_point 2"],
            None,
            (judge, Worker.REGULAR, TP2, 9, 9),
            False,
        ),
    ]
    known = [(e.slots, e.model, e.role, e.worker, e.layout, e.host) for e in port.engines()]
    assert known == [
        ((2,), "actor", POLICY, Worker.PREFILL, ONE_RANK, "10.0.0.2"),
        ((3,), "actor", POLICY, Worker.DECODE, ONE_RANK, "10.0.0.3"),
        ((4, 5), "judge", FROZEN, Worker.REGULAR, TP2, "10.0.0.4"),
    ]


@pytest.mark.parametrize("offload", [True, False])
def test_engines_on_gpus_of_training_lend_their_memory_and_no_others(
    args: Args, plan: PlacementPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: bool
) -> None:
    """Law: if they lend at all; one that nobody sends weights to keeps them on the host meanwhile."""
    prefill, decode, judge = plan.engines
    shared = [dataclasses.replace(engine, colocated=True) for engine in (prefill, judge)]
    plan = dataclasses.replace(plan, engines=(shared[0], decode, shared[1]))
    port, actors = engines_of(args.replace(offload_rollout=offload), plan, tmp_path, monkeypatch)
    specs = [given[1] for _, given, _ in actors.made]
    assert [spec.memory_saver for spec in specs] == [offload, False, offload, offload]
    assert [engine.lends for engine in port.engines()] == [offload, False, offload]
    assert [spec.extra.get("enable_weights_cpu_backup") for spec in specs] == [None, None, True, True]


def test_the_rollout_side_and_the_senders_know_each_engine_as_what_it_is(
    args: Args, plan: PlacementPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was started again is another one for the senders, and the rollout side forgets its old address."""
    port, _ = engines_of(args, plan, tmp_path, monkeypatch)
    said: list[Any] = []
    calls = {name: SimpleNamespace(remote=lambda *a, n=name: said.append((n, *a))) for name in ("admit", "dismiss")}
    rollout = SimpleNamespace(**calls)
    monkeypatch.setattr("slime.cluster.engine_tracker.wait_for", lambda *a, **k: [])
    monkeypatch.setattr("slime.cluster.engine_tracker.ray.wait", lambda refs, **k: (refs, []))
    fleet = Engines(args, port, rollout, KEYS.control, port._hosts, FleetFiles(tmp_path))
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
    assert said == [("dismiss", "judge", ["http://2"], True), ("dismiss", "actor", ["http://1"], True)]
    fleet.members.change(1, State.STARTING, incarnation=1)
    fleet.up(1, "http://1")
    infos = fleet.infos(fleet.members.engines[:2])
    assert infos == [
        EngineInfo(0, "http://0", ONE_RANK, (2,), KEYS.control, 0),
        EngineInfo(1, "http://1", ONE_RANK, (3,), KEYS.control, 1),
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
    """Law: by the mode that the driver asks for and in buckets of the settings, the trainer's version, to the process
    that there is now."""
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
    old, new = (EngineInfo(0, "http://a", ONE_RANK, (1,), KEYS.control, incarnation) for incarnation in (0, 1))
    metrics = rank.sync_weights([old], "retract")
    engine, limit_s, key = made[0]
    num_bytes = sum(tensor.numel() * 4 for tensor in state.values())
    updates = engine.log.count("update")
    assert engine.log == ["pause retract", "begin", *["update"] * updates, "checksums", "end", "resume"]
    assert num_bytes / 4096 <= updates < num_bytes / 4096 * 3 and set(versions) == {5}
    assert (limit_s, key) == (args.weight_sync_timeout_s, KEYS.control) and noted == ["asked", "synced"]
    assert metrics["perf/update_weights_bytes"] == num_bytes
    rank.sync_weights([old], "retract")
    assert len(made) == 1
    rank.sync_weights([new], "retract")
    assert len(made) == 2, "another process is at that address"
    rank.give_up("http://a", 0)
    rank.sync_weights([new], "retract")
    (receiver,) = rank._generating.known.values()
    assert not receiver.is_lost(), "the one before it was"
    rank.give_up("http://a", 1)
    assert receiver.is_lost()
    rank.close()
    with pytest.raises(AssertionError, match="no --eval-fleet"):
        rank.sync_weights([new], "abort", to_eval_fleet=True)
    told: dict[str, Any] = {}
    monkeypatch.setattr(rank_weight_sync, "sync_weights", lambda outgoing, **named: told.update(named) or {})
    rank._carried = {"visual": "a digest"}
    rank.sync_weights([new], "retract")
    assert (told.get("carried"), told["version"]) == ({"visual": "a digest"}, 5), "what engines loaded themselves"
    assert told.get("pause_mode") == "retract"


@pytest.fixture
def second(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RankWeightSync, Any, dict[str, Any]]:
    """Training rank 1 of two, on slot 7 with GPU-b; rank 0 conducts, on slot 4 with GPU-a. With the context that its
    transport was opened in, and what the conductor says next.
    """
    opened: list[Any] = []
    told: list[Any] = []
    said: dict[str, Any] = {"word": [(4, "GPU-a"), (7, "GPU-b")]}

    def values(store: Any, key: bytes, **rank: Any) -> Any:
        return SimpleNamespace(gather=told.append, broadcast=lambda value: said["word"])

    def transport(name: str, args: Args) -> Any:
        return SimpleNamespace(open=lambda context: opened.append(context) or Noting("channel", [], heals=False))

    hook = tmp_path / "hook.py"
    hook.write_text("def written(args, folder, engines):\n    return args, folder, engines\n")
    args = rollout_args(tmp_path, "--sglang-dtype", "float32")
    args = args.replace(device="cuda", custom_update_weight_post_write_path=f"{hook}:written")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-b"))
    monkeypatch.setattr(rank_weight_sync, "RankValues", values)
    monkeypatch.setattr(rank_weight_sync.TRANSPORTS, "build", transport)
    (table, state) = model()
    backend: Any = SimpleNamespace(
        outgoing=lambda dtype: Whole(table, state.items()),
        device=torch.device("cpu"),
        weight_version=5,
        require_weights=lambda: None,
        note_synced=lambda: None,
    )
    rank = RankWeightSync(args, backend, rank=1, slots=[4, 7], address="10.0.0.1")
    (context,) = opened
    assert told == [(7, "GPU-b")]
    return rank, context, said


def test_each_rank_opens_its_transport_with_its_own_gpu_and_the_users_function(
    second: tuple[RankWeightSync, Any, dict[str, Any]],
) -> None:
    """Law: the GPU is that of the rank's own slot, engines are known by the GPUs of theirs, and whoever writes a
    version calls the user's function, with the settings.
    """
    rank, context, _ = second
    assert (context.peers.rank, context.gpu_id, context.training_gpus) == (1, "GPU-b", {"GPU-a", "GPU-b"})
    assert context.address == "10.0.0.1"
    receiver = rank._receiver(EngineInfo(0, "http://a", TP2, (7, 9), None, 0))
    assert receiver.gpu_ids == ("GPU-b", "slot 9")
    assert context.post_write is not None, "nobody calls the user's function"
    given, *rest = context.post_write(Path("/v"), ("http://a",))
    assert vars(given) == vars(rank._args) and rest == ["/v", ["http://a"]]


@pytest.mark.parametrize("heals", [True, False])
def test_whether_a_failed_weight_sync_is_sent_again_is_what_the_conductor_says(
    second: tuple[RankWeightSync, Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, heals: bool
) -> None:
    """Law: all ranks go on together or end together, though each of the others thinks the contrary of its own part."""
    rank, _, said = second
    sent: list[int] = []

    def send(outgoing: Any, **named: Any) -> dict[str, float]:
        sent.append(named["version"])
        if len(sent) == 1:
            raise WeightSyncError("differs")
        return {}

    monkeypatch.setattr(rank_weight_sync, "sync_weights", send)
    monkeypatch.setattr(rank._generating.channel, "heals", not heals)
    monkeypatch.setattr(rank._generating.channel, "costs", dict)
    said["word"] = heals
    went_on = False
    with suppress(WeightSyncError):
        rank.sync_weights([], "abort")
        went_on = True
    assert (went_on, sent) == (heals, [5] * (1 + heals))


@pytest.mark.usefixtures("alone")
def test_an_evaluation_fleet_has_its_own_channel_and_is_no_weight_sync_to_those_that_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: no process group or receiver is shared, and what remembers the weights that sample is not told."""
    held = ("--eval-prompt-data", "held", str(write_prompts(tmp_path / "held.jsonl", 2)), "--eval-interval", "1")
    args = rollout_args(tmp_path, "--eval-fleet", "1", *held, "--sglang-dtype", "float32")
    (table, state), noted = model(), list[str]()
    backend: Any = SimpleNamespace(
        outgoing=lambda dtype: Whole(table, state.items()),
        sight=SimpleNamespace(digests=lambda dtype, digest: {}),
        device=torch.device("cpu"),
        weight_version=5,
        require_weights=lambda: None,
        note_synced=lambda: noted.append("synced"),
    )
    rank = RankWeightSync(args, backend, rank=0, slots=[0], address="127.0.0.1")
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(rank_weight_sync, "sync_weights", lambda outgoing, **named: sent.append(named) or {})
    policy, evaluator = (EngineInfo(i, f"http://{i}", ONE_RANK, (i,), KEYS.control) for i in (0, 1))
    rank.sync_weights([policy], "retract")
    rank.sync_weights([evaluator], "abort", to_eval_fleet=True)
    rank.sync_weights([policy], "retract")
    urls = [[receiver.control.url for receiver in one["receivers"]] for one in sent]
    assert urls == [["http://0"], ["http://1"], ["http://0"]] and noted == ["synced"] * 2
    first, between, last = (one["channel"] for one in sent)
    assert first is last is not between and sent[0]["receivers"][0] is sent[2]["receivers"][0]
    assert [one["version"] for one in sent] == [5] * 3 and sent[1]["fills"] is None, "recorded fills are not replayed"
    rank.close()


class Hosts:
    """Guarded hosts of which some are lost, or not guarded yet."""

    def __init__(self) -> None:
        self.lost, self.guarded = set[str](), False

    def has(self, host: Host) -> bool:
        return host.name not in self.lost

    def is_guarded(self, host: Host) -> bool:
        return self.guarded


def test_an_engine_that_starts_again_waits_for_guardians_its_old_actors_and_lent_memory(
    args: Args, plan: PlacementPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: on all of its hosts, under a name of its own; the head is asked when the gates of all are open."""
    port, actors = engines_of(args, plan, tmp_path, monkeypatch)
    hosts, done, said, now = Hosts(), set[str](), actors.said, [100.0]
    monkeypatch.setattr(port, "_hosts", hosts)
    monkeypatch.setattr(port, "is_gated", lambda index: True)
    monkeypatch.setattr(engine_actors, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(engine_actors.ray, "wait", lambda refs, **_: ([r for r in refs if r in done], []))
    monkeypatch.setattr(engine_actors.ray, "kill", lambda actor: said.append(("kill", actor.name)))
    monkeypatch.setattr(engine_actors.ray, "get", lambda ref: f"answer of {ref}")
    port.may_take_memory = lambda: False
    hosts.lost = {"h5"}
    assert port.has_host(1) and not port.has_host(2), "the second host of its engine"
    old, both = {"stop 2", "stop 2_node1"}, ["2_1", "2_1_node1"]
    said.clear()
    port.start(port.engines()[2].moved(State.DEAD).moved(State.STARTING, incarnation=1))
    assert {f"{method} {name}" for method, name in said} == old and port.stop([2]) == []
    done |= old
    assert port.started(2) is None and ("kill", "2") not in said, "nobody guards its hosts"
    hosts.guarded = True
    done.clear()
    assert port.started(2) is None and ("kill", "2") not in said, "the old ones end in order"
    done |= old
    said.clear()
    assert port.started(2) is None
    assert [one for one in said if one[0] != "problem"] == [
        ("kill", "2"),
        ("kill", "2_node1"),
        ("meeting_point", "2_1"),
    ]
    assert [given[0] for _, given, _ in actors.made[4:]] == both
    port.may_take_memory = lambda: True
    said.clear()
    assert port.started(2) is None
    gates = [("open_gate", name) for name in both]
    assert [one for one in said if one[0] != "problem"] == [*gates, ("wait_ready", "2_1", args.engine_start_timeout_s)]
    assert port.takes_memory
    done.add("wait_ready 2_1")
    assert port.started(2) == "answer of wait_ready 2_1" and not port.takes_memory
    assert port.stop([2]) == ["stop 2_1", "stop 2_1_node1"]


def test_an_owner_is_silent_after_its_limit_in_seconds_and_each_host_is_looked_at(
    args: Args, plan: PlacementPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, actors = engines_of(args, plan, tmp_path, monkeypatch)
    now = [100.0]
    monkeypatch.setattr(engine_actors, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(engine_actors, "Silence", partial(liveness.Silence, clock=lambda: now[0]))
    monkeypatch.setattr(liveness, "load", lambda: 1.0)
    monkeypatch.setattr(engine_actors.ray, "wait", lambda refs, **_: ([], refs))
    port.watch(port.engines()[2].moved(State.SYNCING, url="http://2"))
    actors.said.clear()
    assert port.troubles() == {}
    assert actors.said == [("problem", name, False) for name in ("2", "2_node1")], "who takes weights may be silent"
    for _ in range(2):
        now[0] += engine_actors.OWNER_LIMIT_S / 2
        assert port.troubles() == {}
    now[0] += 0.5
    assert port.troubles() == {2: "its actor has not responded for 8 s"}
    actors.said.clear()
    for index in (0, 1):
        port.watch(port.engines()[index].moved(State.SYNCING, url="http://").moved(State.READY))
    port.heard(0)
    port.troubles()
    assert actors.said == [("problem", "0", False), ("problem", "1", True)], "who brings tokens need not answer"


def test_the_actor_of_an_engine_hands_each_of_its_parts_what_the_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: its server, the control plane, the watch and the weights agent know address, key, folders and limits."""
    shared, local, said, made = str(tmp_path / "shared"), str(tmp_path / "local"), list[Any](), dict[str, Any]()
    health = [f"--rollout-health-check-{name}" for name in ("interval", "timeout", "first-wait")]
    args = rollout_args(
        tmp_path,
        *("--update-weight-transport", "disk", "--update-weight-disk-dir", shared),
        *("--update-weight-local-checkpoint-dir", local, "--weight-sync-timeout-s", "41"),
        *(word for flag, value in zip(health, ("11", "7", "3"), strict=True) for word in (flag, value)),
    )
    spec, url = ServerSpec("m", "float32", api_key=KEYS.use, admin_key=KEYS.admin), "http://10.0.0.4:1"
    for name in ("SGLangServer", "HttpEngineControl", "AgentProcess", "ServerWatch"):

        def make(*given: Any, name: str = name, **named: Any) -> Noting:
            made[name] = (given, named)
            server = {"url": url, "problem": "p", "scheduler_answers": "a", "processor_s": "c", "stands": "s"}
            return Noting(name, said, **(server if "L" in name else {}))

        monkeypatch.setattr(engine_actors, name, make)
    monkeypatch.setattr(engine_actors, "setup_logging", lambda path, **_: None)
    actor = plain(engine_actors.EngineActor)("2", spec, str(tmp_path), args, "10.0.0.4")
    assert actor.wait_ready(5.0) == url
    assert made == {
        "SGLangServer": ((spec,), {"host": "10.0.0.4", "log_path": tmp_path / "engine_2.log"}),
        "HttpEngineControl": ((url, ONE_RANK, 41.0, KEYS.control), {}),
        "AgentProcess": (
            (AgentSettings(shared, local, None, 41.0), url, KEYS.control, tmp_path / "weights_agent_2.log"),
            {},
        ),
        "ServerWatch": (
            ("p", "a"),
            {"interval_s": 11.0, "timeout_s": 7.0, "first_wait_s": 3.0, "used_s": "c", "stands": "s"},
        ),
    }
    said.clear()
    actor.release_memory(["weights"])
    actor.resume_memory(["kv_cache"])
    actor.problem(True)
    actor.stop()
    control, agent = "HttpEngineControl", "AgentProcess"
    assert [one for one in said if one[0] != "trouble"] == [
        *[("flush_cache", control), ("release_memory", control, ["weights"]), ("resume_memory", control, ["kv_cache"])],
        *[("tend", agent), ("close", "ServerWatch"), ("stop", agent), ("stop", "SGLangServer")],
    ]


def test_each_training_rank_and_the_rollout_side_get_their_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: slot, threads and address of a rank are those of its place; the rollout side is on the driver's host."""
    hosts = tuple(Host(f"h{i}", f"10.0.0.{i}", 2, 4, f"{i:056x}") for i in range(2))
    plan, args = PlacementPlan(hosts, (0, 0, 1), (0, 2), (), (3, 1)), SimpleNamespace()
    folder: Any = SimpleNamespace(logs=tmp_path)
    made: list[Any] = []

    def placed(actor: Any, **options: Any) -> Any:
        return SimpleNamespace(remote=lambda *given: made.append((actor, options, given)))

    monkeypatch.setattr(start_actors, "_placed", placed)
    monkeypatch.setattr(start_actors, "introduce", lambda actor, process: actor)
    start_actors._create_trainers(args, plan, folder, Slots(), plan.address_of)  # type: ignore[arg-type]
    start_actors._create_rollout(args, plan, folder, 2, KEYS)  # type: ignore[arg-type]
    (strategy,) = (options.pop("scheduling_strategy") for _, options, _ in made[2:])
    assert made == [
        (start_actors.TrainActor, {"slot": 0}, (args, 0, (0, 2), 3, str(tmp_path), "10.0.0.0")),
        (start_actors.TrainActor, {"slot": 2}, (args, 1, (0, 2), 1, str(tmp_path), "10.0.0.1")),
        (start_actors.RolloutActor, {"num_cpus": 0, "max_concurrency": 16}, (args, 2, str(tmp_path), KEYS)),
    ]
    assert (strategy.node_id, strategy.soft) == (hosts[0].node_id, False)


def test_engines_take_memory_when_every_training_rank_has_lent_its_own() -> None:
    said: list[Any] = []
    engines, ranks = ([Noting(f"{kind} {i}", said) for i in range(2)] for kind in ("engine", "rank"))
    args: Any = SimpleNamespace(device="cuda", offload_train=True, debug_train_only=False)
    lent = ["sleep rank 0", "sleep rank 1"]
    assert start_actors._lend(args, engines, ranks) == (lent, ["open_gate engine 0", "open_gate engine 1"])
    assert said[2:] == [("open_gate", f"engine {i}", *lent) for i in range(2)]
    args.offload_train = False
    assert start_actors._lend(args, engines, ranks) == ([], [])


def test_the_keys_of_a_run_are_the_users_if_there_are_any(tmp_path: Path) -> None:
    """Law: --router-api-key is the engines', too, because a router hands on what it is sent. It opens no weights.
    Engines of somebody else have the keys that they were started with."""
    assert start_actors.keys_of(rollout_args(tmp_path, "--router-api-key", "theirs")).use == "theirs"
    assert start_actors.keys_of(rollout_args(tmp_path, "--sglang-api-key", "ours")).use == "ours"
    assert start_actors.keys_of(rollout_args(tmp_path, "--sglang-admin-api-key", "ours")).control == "ours"
    made = [start_actors.keys_of(rollout_args(tmp_path)) for _ in range(2)]
    keys = {key for one in made for key in (one.use, one.admin)}
    assert len(keys) == 4 and {len(str(key)) for key in keys} == {64}, "each run makes its own, for weights another one"
    assert not any(str(key) in repr(made) for key in keys)
    foreign = ("--rollout-external-engine-addrs", "a:1", "--sglang-api-key", "all")
    assert start_actors.keys_of(rollout_args(tmp_path, *foreign)) == EngineKeys("all")


def test_a_bundle_and_its_share_are_those_of_the_slot_and_a_reservation_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: slots follow devices, whatever the order of bundles; on a CPU no GPU is asked for."""
    removed: list[Any] = []
    monkeypatch.setattr(host_actor, "get_placement_group", lambda name: f"group {name}")
    monkeypatch.setattr(host_actor, "remove_placement_group", removed.append)
    options = host_actor.Slots("group", "GPU", (2, 0, 1), (5, 6, 7)).options(0, 0.4)
    strategy = options.pop("scheduling_strategy")
    assert (strategy.placement_group, strategy.placement_group_bundle_index) == ("group", 2)
    assert options == {"num_cpus": 0.4, "num_gpus": 0.4}
    assert "num_gpus" not in host_actor.Slots("group", "CPU", (0,), None).options(0, 0.2)
    host_actor.give_back()
    assert removed == ["group slots"]


def test_a_training_rank_has_the_variables_that_were_asked_for_and_counts_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, said = rollout_args(tmp_path, "--train-env-vars", json.dumps({"NCCL_DEBUG": "INFO"})), list[Any]()
    monkeypatch.setattr(train_actor, "setup_logging", lambda path, **_: None)
    monkeypatch.setattr(train_actor.os, "environ", {})
    monkeypatch.setattr("slime.core.cores.usable_cores", lambda: 4)
    rank = plain(train_actor.TrainActor)(args, 1, (0, 2), 3, str(tmp_path), "127.0.0.1")
    wanted = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE"}
    assert wanted.items() <= train_actor.os.environ.items()
    rank.give_up("http://a", 1)  # before there is a weight sync
    own_time = SimpleNamespace(take_s=lambda: 2.5)
    rank._backend = SimpleNamespace(
        weight_version=4, train=lambda batch: {}, tflops=lambda batch, s: 1.0, own_time=own_time
    )
    rank._weight_sync = Noting("sync", said, sync_weights=lambda engines, mode, **whom: {"seconds": 1.0})
    assert rank.train("batch") == {"perf/rank_train_time": 2.5}, "rank 0 says what is the same on all ranks"
    assert rank.sync_weights([], "abort") == {}
    rank._rank = 0
    assert rank.sync_weights([], "abort") == {"seconds": 1.0, WEIGHT_VERSION: 5.0}
    assert rank.train("batch") == {"perf/actor_train_tflops": 1.0, "perf/rank_train_time": 2.5}
    rank._rank = 1
    rank.give_up("http://a", 1)
    assert said == [("give_up", "sync", "http://a", 1)]
    monkeypatch.setattr("slime.training.state.checkpoint.verify", lambda path, share: said.append((str(path), share)))
    rank.verify("folder")
    assert said[1:] == [("folder", (1, 2))]


def test_each_router_knows_its_port_its_key_and_whether_engines_are_in_pairs(
    args: Args, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(rollout_actor, "Routers", lambda make: {name: one() for name, one in make.items()})
    monkeypatch.setattr(rollout_actor, "Router", lambda **named: named)
    monkeypatch.setattr(rollout_actor, "ExistingRouter", lambda *given, **named: (given, named))
    settings = args.replace(router_host="0.0.0.0", router_port=7001, router={"policy": "random"})
    made = rollout_actor._routers(settings, topology_of(settings), tmp_path, KEYS.use)  # type: ignore[assignment]
    common = {"host": "0.0.0.0", "extra_args": {"policy": "random", "api_key": KEYS.use}, "worker_api_key": KEYS.use}
    assert made == {
        "actor": {**common, "port": 7001, "log_path": tmp_path / "router.log", "pairs": True},
        "judge": {**common, "port": None, "log_path": tmp_path / "router_judge.log", "pairs": False},
    }
    theirs = {"router": {"api_key": "theirs"}, "sglang_router_ip": "10.0.0.9", "sglang_router_port": 81}
    settings = args.replace(**theirs)
    made = rollout_actor._routers(settings, topology_of(settings), tmp_path, "theirs")  # type: ignore[assignment]
    assert made["actor"] == (("10.0.0.9", 81), {"api_key": "theirs", "worker_api_key": "theirs"})
    assert made["judge"]["extra_args"]["api_key"] == "theirs"


def test_routers_start_only_if_somebody_may_ask_them(tmp_path: Path) -> None:
    """Law: the run's own requests go to engines; user code, the user's flags and serving alone need a router."""
    assert not needs_routers(rollout_args(tmp_path))
    for flags in (
        ("--custom-rm-path", "tests.support.judged.generate"),
        ("--rm-type", "examples.own_grader"),
        ("--router-policy", "random"),
        ("--router-port", "7001"),
        ("--num-rollout", "0", "--debug-rollout-only"),
    ):
        assert needs_routers(rollout_args(tmp_path, *flags)), flags


def test_clients_and_routers_hear_of_each_engine_that_comes_and_goes() -> None:
    said: list[Any] = []
    actor = object.__new__(plain(rollout_actor.RolloutActor))
    actor._manager, actor._routers = Noting("clients", said), Noting("routers", said)
    asyncio.run(actor.admit("judge", ["http://1"], Worker.DECODE))
    asyncio.run(actor.dismiss("judge", ["http://1"], True))
    assert said == [
        *(("admit", who, "judge", ["http://1"], Worker.DECODE) for who in ("clients", "routers")),
        ("dismiss", "clients", "judge", ["http://1"], True),
        ("dismiss", "routers", "judge", ["http://1"]),
    ]
