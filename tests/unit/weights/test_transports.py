"""The registry of transports: names, a user's own, what each refuses, and that knowing them costs no torch."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from slime.core.errors import ConfigError, EngineError
from slime.core.topology import EngineLayout
from slime.settings.fields import declared
from slime.weights.receivers import Receiver
from slime.weights.transports import TRANSPORTS, Channel, Transport, distributed
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.distributed import DistributedTransport
from slime.weights.transports.mixed import MixedChannel
from tests.support.weights import disk_settings, transport_context

OWN_TRANSPORT = """
from dataclasses import dataclass

from slime.weights.transports import Channel, Transport


class PigeonChannel(Channel):
    name = "pigeon"

    def prepare(self, bucket, receivers):
        return bucket

    def deliver(self, prepared, receivers, *, version):
        raise AssertionError("the pigeon is ill")


@dataclass(frozen=True, kw_only=True)
class Pigeon(Transport):
    num_pigeons: int = 3

    def open(self, context):
        return PigeonChannel()
"""


def settings(**given: Any) -> Any:
    """Those of a run on GPUs of its own, unless told otherwise."""
    usual: dict[str, Any] = {
        "device": "cuda",
        "colocate": False,
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 1,
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "hf_checkpoint": "model",
        "sglang_config": None,
        "rollout_external_engine_addrs": (),
        "prefill_num_servers": None,
        "eval_fleet": None,
        "debug_train_only": False,
        "debug_rollout_only": False,
        "run_dir": "runs/a",
        **vars(disk_settings(None)),
    }
    return SimpleNamespace(**{**usual, **given})


def build(name: str, **given: Any) -> Transport:
    return TRANSPORTS.build(name, settings(**given))


def test_the_names_and_the_alias() -> None:
    assert TRANSPORTS.names() == ("disk", "distributed", "mixed", "nccl", "tensor")
    assert TRANSPORTS.get("nccl") is TRANSPORTS.get("distributed") and TRANSPORTS.get("nccl").name == "distributed"


def test_an_unknown_transport_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"--update-weight-transport dsik.*did you mean disk.*tensor"):
        build("dsik")


def test_a_users_own_transport_by_path(tmp_path: Path) -> None:
    file = tmp_path / "pigeons.py"
    file.write_text(OWN_TRANSPORT)
    transport: Any = build(f"{file}:Pigeon", num_pigeons=5)
    assert transport.num_pigeons == 5
    assert transport.check(settings()) is None, "it works anywhere"


@pytest.mark.parametrize(
    "name, given, refused",
    [
        ("tensor", {}, "requires --colocate on cuda"),
        ("tensor", {"colocate": True}, None),
        ("tensor", {"colocate": True, "rollout_num_gpus": 2}, "use mixed or disk"),
        ("tensor", {"colocate": True, "rollout_num_gpus": 2, "device": "cpu"}, None),
        ("mixed", {"colocate": True, "rollout_num_gpus": 2}, None),
        ("mixed", {"colocate": True}, "use tensor, distributed or disk"),
        ("tensor", {"device": "cpu"}, None),
        ("tensor", {"debug_train_only": True}, None),
        ("distributed", {}, None),
        ("distributed", {"colocate": True}, "two ranks on one GPU"),
        ("distributed", {"colocate": True, "device": "cpu"}, None),
        ("disk", {"update_weight_disk_dir": "weights"}, None),
        ("disk", {"update_weight_disk_dir": "weights", "colocate": True}, None),
        ("disk", {"update_weight_mode": "delta"}, "requires --update-weight-local-checkpoint-dir"),
        ("disk", {"update_weight_mode": "delta", "update_weight_local_checkpoint_dir": "/tmp/x"}, None),
        ("disk", {"update_weight_mode": "delta", "debug_train_only": True}, None),
    ],
)
def test_each_says_where_it_works(name: str, given: dict[str, Any], refused: str | None) -> None:
    complaint = build(name, **given).check(settings(**given))
    assert complaint is None if refused is None else refused in str(complaint)


def test_the_folder_for_weights_is_derived_by_whatever_name_the_transport_is_chosen() -> None:
    compute = declared(DiskTransport.__dataclass_fields__["update_weight_disk_dir"]).compute
    assert compute is not None, "it is derived"
    assert compute(settings(update_weight_transport="disk")) == "runs/a/weights"
    assert compute(settings(update_weight_transport="my.transports:SharedDisk")) == "runs/a/weights"


def test_the_command_line_knows_them_without_torch() -> None:
    program = "import sys; from slime.weights.transports import TRANSPORTS; TRANSPORTS.names(); "
    program += "assert not {'torch', 'safetensors.torch', 'ray'} & set(sys.modules), 'torch was imported'"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


class Way(Channel):
    """Writes down what it is asked to do, and for whom."""

    def __init__(self, name: str, log: list[tuple[str, str, list[str]]]) -> None:
        self._name, self._log = name, log

    def _note(self, what: str, receivers: Sequence[Receiver] = ()) -> None:
        self._log.append((self._name, what, [one.gpu_ids[0] for one in receivers]))

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:
        self._note("begin", receivers)

    def prepare(self, bucket: Any, receivers: Sequence[Receiver]) -> Any:
        self._note("prepare", receivers)
        return f"{self._name} {bucket}"

    def deliver(self, prepared: Any, receivers: Sequence[Receiver], *, version: int) -> None:
        assert prepared == f"{self._name} bucket"
        self._note("deliver", receivers)

    def finish(self, receivers: Sequence[Receiver], *, version: int, reports: Sequence[Any]) -> None:
        assert reports == [None, None], "of each sender, and of nothing that the other way reports"
        self._note("finish", receivers)

    def abandon(self) -> None:
        self._note("abandon")


def test_engines_of_both_kinds_get_weights_each_by_the_way_that_reaches_it() -> None:
    log: list[tuple[str, str, list[str]]] = []
    mixed = MixedChannel(Way("shared", log), Way("apart", log), frozenset({"g0", "g1"}))
    engines = [Receiver(cast("Any", object()), gpus) for gpus in (("g0", "g1"), ("slot 2",), ("g1",), ("slot 3", "g0"))]
    mixed.begin(engines, version=1)
    mixed.deliver(mixed.prepare(cast("Any", "bucket"), engines), engines, version=1)
    mixed.finish(engines, version=1, reports=["of one", "of another"])
    assert log == [
        (way, what, whom)
        for what in ("begin", "prepare", "deliver", "finish")
        for way, whom in (("shared", ["g0", "g1"]), ("apart", ["slot 2", "slot 3"]))
    ]
    log.clear()
    alone = engines[:1]
    mixed.deliver(mixed.prepare(cast("Any", "bucket"), alone), alone, version=2)
    mixed.abandon()
    assert [way for way, what, _ in log if what != "abandon"] == ["shared", "shared"]
    assert [way for way, what, _ in log if what == "abandon"] == ["shared", "apart"]


class Invited:
    """An engine that notes to which place in a group it is asked, and what it is told of a broadcast."""

    def __init__(self, url: str, tp_size: int, said: list[Any]) -> None:
        self.url, self.layout, self._said = url, EngineLayout(tp_size=tp_size), said

    def init_weights_update_group(self, **told: Any) -> None:
        self._said.append((self.url, told["rank_offset"], told["world_size"], told["backend"], told["group_name"]))

    def update_weights_from_distributed(self, **told: Any) -> None:
        self._said.append((self.url, told["names"], told["shapes"], told["weight_version"], told["group_name"]))

    def destroy_weights_update_group(self, *, group_name: str) -> None:
        self._said.append((self.url, "leaves", group_name))


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The (backend, world size, name) of all groups made: no process group, and no engine that joins one."""

    def join(backend: str, store: Any, world_size: int, name: str, limit: Any) -> Any:
        made.append((backend, world_size, name))
        return name

    made: list[Any] = []
    monkeypatch.setattr("slime.weights.rendezvous.open_store", lambda listener, **_: listener)
    monkeypatch.setattr("slime.weights.rendezvous.keep_gloo_on", lambda address: None)
    monkeypatch.setattr(distributed, "_have_come", lambda *given: True)
    monkeypatch.setattr(distributed, "join_group", join)
    return made


def test_each_engine_has_its_own_ranks_of_a_group_that_is_made_anew_when_engines_change(
    monkeypatch: pytest.MonkeyPatch, groups: list[Any]
) -> None:
    """Law: rank 0 is the sender's, and every rank of every engine has one place behind it."""
    import torch.distributed as dist

    said, gone = list[Any](), list[Any]()
    done = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
    monkeypatch.setattr(dist, "broadcast", lambda flat, **_: done)
    monkeypatch.setattr(dist, "destroy_process_group", gone.append)
    channel = DistributedTransport().open(transport_context())
    three = [Receiver(cast("Any", Invited(f"http://{i}", width, said))) for i, width in enumerate((2, 1, 2))]
    bucket: Any = SimpleNamespace(tensors=(("a", torch.zeros(2, 3)),), flat=torch.zeros(24))
    channel.begin(three, version=7)
    channel.deliver(channel.prepare(bucket, three), three, version=7)
    ((backend, world_size, name),) = groups
    assert (backend, world_size) == ("gloo", 6)
    assert sorted(said[:3]) == [(f"http://{i}", first, 6, "gloo", name) for i, first in enumerate((1, 3, 4))]
    assert sorted(said[3:]) == [(f"http://{i}", ["a"], [[2, 3]], 7, name) for i in range(3)]
    channel.begin(three, version=8)
    assert len(groups) == 1 and not gone, "the same engines are in it still"
    assert channel.costs() == {"update_weights_groups_built": 1.0}
    said.clear()
    channel.begin([*three, Receiver(cast("Any", Invited("http://3", 1, said)))], version=9)
    assert sorted(said[:3]) == [(f"http://{i}", "leaves", name) for i in range(3)] and gone == [name]
    assert groups[1][1] == 7 and groups[1][2] != name
    assert sorted(said[3:])[-1] == ("http://3", 6, 7, "gloo", groups[1][2])
    assert channel.costs() == {"update_weights_groups_built": 2.0}
    channel.close()


class Dead(Invited):
    """An engine that dies once it has joined."""

    def update_weights_from_distributed(self, **told: Any) -> None:
        raise EngineError(f"engine {self.url} is gone")


def test_a_sender_does_not_wait_in_nccl_for_an_engine_that_died_before_the_first_broadcast(
    monkeypatch: pytest.MonkeyPatch, groups: list[Any]
) -> None:
    """Law: connecting blocks for good then, and the sender raises all the same. The next group connects afresh."""
    import torch.distributed as dist

    comes, gone = threading.Event(), list[Any]()
    done = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    def broadcast(flat: Any, **_: Any) -> Any:
        comes.wait()
        return done

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(dist, "destroy_process_group", gone.append)
    channel = DistributedTransport().open(transport_context(device="cuda"))
    bucket: Any = SimpleNamespace(tensors=(("a", torch.zeros(2, 3)),), flat=torch.zeros(24))
    dead, alive = ([Receiver(cast("Any", kind("http://0", 1, [])))] for kind in (Dead, Invited))
    channel.begin(dead, version=1)
    with pytest.raises(EngineError, match="engine http://0 is gone"):
        channel.deliver(bucket, dead, version=1)
    channel.abandon()
    comes.set()
    channel.begin(alive, version=2)
    channel.deliver(bucket, alive, version=2)
    assert [backend for backend, _, _ in groups] == ["nccl", "nccl"]
    channel.close()


def test_a_group_with_a_broadcast_that_never_ends_is_aborted(
    monkeypatch: pytest.MonkeyPatch, groups: list[Any]
) -> None:
    """Law: NCCL's broadcast to a dead engine occupies the GPU, and destroying the group would wait for it."""
    import torch.distributed as dist

    log = list[str]()
    group = SimpleNamespace(abort=lambda: log.append("abort"))
    stuck = SimpleNamespace(is_completed=lambda: "abort" in log, wait=lambda: None)
    monkeypatch.setattr(distributed, "join_group", lambda *given: group)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(dist, "broadcast", lambda flat, **_: stuck)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: log.append("destroy"))
    channel = DistributedTransport().open(transport_context(device="cuda"))
    bucket: Any = SimpleNamespace(tensors=(("a", torch.zeros(2, 3)),), flat=torch.zeros(24))
    dead = [Receiver(cast("Any", Dead("http://0", 1, [])))]
    channel.begin(dead, version=1)
    with pytest.raises(EngineError, match="engine http://0 is gone"):
        channel.deliver(bucket, dead, version=1)
    channel.close()
    assert log == ["abort", "destroy"]
