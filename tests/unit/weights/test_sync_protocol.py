"""Laws of the weight sync that need no engine: the order of the protocol, and the agreement of ranks."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures.thread import _WorkItem
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from slime.core.errors import DeadlineExceeded, EngineError, WeightSyncError
from slime.core.topology import ONE_RANK, EngineLayout
from slime.models.common.table import FamilyTable
from slime.serving.payloads import digest
from slime.weights import receivers as receivers_module
from slime.weights.receivers import Peers, Receiver, on_all
from slime.weights.send_plan import Buffers, Turn
from slime.weights.sync import CAUSES, PAUSED, PauseCauses, sync_weights
from slime.weights.transports import Channel, Transport
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.distributed import DistributedTransport
from slime.weights.transports.tensor import TensorTransport
from tests.support.weights import (
    FakeEngine,
    FakeWire,
    NotedChannel,
    Ranks,
    State,
    TamperingChannel,
    Whole,
    disk_settings,
    model,
    transport_context,
)

TP2, PP2 = EngineLayout(tp_size=2), EngineLayout(pp_size=2)


def run(table: FamilyTable, state: State, engines: list[FakeEngine], wire: FakeWire, **kwargs: Any) -> dict[str, float]:
    peers = kwargs.pop("peers", Peers())
    channel: Channel = TensorTransport().open(transport_context(serialize=wire.serialize, peers=peers))
    if tamper := kwargs.pop("tamper", None):
        channel = TamperingChannel(channel, tamper)
    return sync_weights(
        Whole(table, state.items()),
        receivers=[Receiver(e) for e in engines],  # type: ignore[arg-type]
        channel=channel,
        digest=digest,
        version=3,
        buffer_bytes=4096,
        peers=peers,
        **kwargs,
    )


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_the_protocol_pauses_drains_updates_verifies_then_resumes(mode: str) -> None:
    table, state = model()
    wire = FakeWire()
    engines = [FakeEngine(f"http://{i}", table, wire, layout) for i, layout in enumerate((ONE_RANK, TP2, PP2))]
    metrics = run(table, state, engines, wire, pause_mode=mode)
    for engine in engines:
        steps = [s for i, s in enumerate(engine.log) if engine.log[i - 1 : i] != [s]]
        drains = ["flush"] if mode == "abort" else []  # requests that stay keep a cache from being flushed
        assert steps == [f"pause {mode}", *drains, "begin", "update", "checksums", "end", "resume"]
    assert metrics["update_weights_bytes"] == sum(t.numel() * 4 for t in state.values())


def test_a_bucket_above_the_limit_is_alone_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    run_item = _WorkItem.run

    def run_slowly(*args: Any) -> None:
        run_item(*args)
        time.sleep(0.05)  # the result is there, and the sending thread still holds the arguments of the call

    monkeypatch.setattr(_WorkItem, "run", run_slowly)
    table, state = model()
    wire, made = FakeWire(), list[StorageWeakRef]()
    alone = []

    def allocate(num_bytes: int) -> torch.Tensor:
        gc.collect()
        if num_bytes > 4096:
            alone.append(all(memory.expired() for memory in made))
        flat = torch.empty(num_bytes, dtype=torch.uint8)
        made.append(StorageWeakRef(flat.untyped_storage()))
        return flat

    gc.freeze()  # makes gc.collect quicker than the sending thread
    try:
        run(table, state, [FakeEngine("http://a", table, wire)], wire, buffers=Buffers(allocate))
    finally:
        gc.unfreeze()
    assert len(made) > 3 and alone and all(alone), alone


def test_every_departure_is_named_and_no_engine_resumes() -> None:
    table, state = model()
    wire = FakeWire()
    engines = [FakeEngine("http://a", table, wire), FakeEngine("http://b", table, wire, TP2)]
    engines[1].drop = "model.norm.weight"

    def tamper(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1 if name == "model.layers.0.mlp.up_proj.weight" else tensor

    with pytest.raises(WeightSyncError) as caught:
        run(table, state, engines, wire, tamper=tamper)
    text = str(caught.value)
    for part in (
        "http://a rank 0",
        "http://b rank 0",
        "http://b rank 1",
        "gate_up_proj",
        "up_proj.weight",
        "version 3",
    ):
        assert part in text
    assert "missing: model.norm.weight" in text
    assert not any("resume" in e.log for e in engines)


@pytest.mark.parametrize("step", ["pause abort", "flush", "begin", "update", "checksums", "end"])
def test_a_failing_engine_leaves_all_paused_and_the_stream_is_walked_to_its_end(step: str) -> None:
    table, state = model()
    wire = FakeWire()
    engines = [FakeEngine("http://a", table, wire), FakeEngine("http://b", table, wire)]
    engines[1].fail_at = step
    walked: list[str] = []

    class Walked(Whole):
        def tensors(self, turn: Turn) -> Any:
            for item in super().tensors(turn):
                walked.append(item[0])
                yield item

    with pytest.raises(EngineError, match="http://b refuses"):
        sync_weights(
            Walked(table, state.items()),
            receivers=[Receiver(e) for e in engines],  # type: ignore[arg-type]
            channel=TensorTransport().open(transport_context(serialize=wire.serialize)),
            digest=digest,
            version=1,
            buffer_bytes=4096,
        )
    assert walked == list(state), "iterating is a collective of the trainer: every rank must finish it"
    assert not any("resume" in e.log for e in engines)


@pytest.mark.parametrize("broken", [None, "update", "serialize"])
def test_all_trainer_ranks_agree_and_each_gpu_is_served_by_its_own_rank(broken: str | None) -> None:
    table, state = model()
    ranks, wires = Ranks(2), [FakeWire(), FakeWire()]
    shared = FakeWire()
    engine = FakeEngine("http://a", table, shared, TP2)
    receiver = Receiver(engine, gpu_ids=("g1", "g0"))  # type: ignore[arg-type]
    engine.fail_at = broken
    seen: list[list[str]] = []
    outcomes: list[Any] = [None, None]

    def member(rank: int) -> None:
        def serialize(tensors: Any, num: int, **rest: Any) -> tuple[list[str], object]:
            if broken == "serialize" and rank == 1:
                raise RuntimeError("no handle")
            names, held = wires[rank].serialize(tensors, num, **rest)
            tickets = [f"g{rank}-{n}" for n in names]
            shared.tickets.update({t: wires[rank].tickets[n] for t, n in zip(tickets, names, strict=True)})
            return tickets, held

        context = transport_context(serialize=serialize, peers=ranks.peers(rank), gpu_id=f"g{rank}")
        try:
            outcomes[rank] = sync_weights(
                Whole(table, state.items(), rank=rank),
                receivers=[receiver],
                channel=TensorTransport().open(context),
                digest=digest,
                version=1,
                buffer_bytes=4096,
                peers=ranks.peers(rank),
            )
        except Exception as error:
            outcomes[rank] = error

    original = engine.update_weights_from_tensor

    def spy(payloads: Sequence[str], **update: Any) -> None:
        seen.append([p[:2] for p in payloads])
        original(payloads, **update)

    engine.update_weights_from_tensor = spy  # type: ignore[method-assign]
    threads = [threading.Thread(target=member, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if broken is None:
        assert isinstance(outcomes[0], dict) and outcomes[0] == outcomes[1]
        assert seen and all(pair == ["g1", "g0"] for pair in seen)
    else:
        kind = EngineError if broken == "update" else WeightSyncError
        assert all(isinstance(o, kind) for o in outcomes) and str(outcomes[0]) == str(outcomes[1])
        assert "resume" not in engine.log


def by_two_senders(
    engine: FakeEngine, transport: Transport, tmp_path: Path, **context: Any
) -> tuple[list[list[str]], list[Any]]:
    """One weight sync as version 3 of two ranks that both send: of each what its channel was asked, and the outcome."""
    (table, state), ranks = model(), Ranks(2)
    (checkpoint := tmp_path / "checkpoint").mkdir(exist_ok=True)
    (checkpoint / "config.json").write_text("{}")
    channels: list[NotedChannel] = []
    outcomes: list[Any] = [None, None]
    for rank in range(2):
        given = transport_context(peers=ranks.peers(rank), hf_checkpoint=checkpoint, **context)
        channels.append(NotedChannel(transport.open(given)))

    def member(rank: int) -> None:
        try:
            outcomes[rank] = sync_weights(
                Whole(table, state.items(), rank=rank, senders=((0, 1),)),
                receivers=[Receiver(engine)],  # type: ignore[arg-type]
                channel=channels[rank],
                digest=digest,
                version=3,
                buffer_bytes=4096,
                peers=ranks.peers(rank),
            )
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [[one for i, one in enumerate(c.log) if c.log[i - 1 : i] != [one]] for c in channels]
    return told, outcomes


def test_every_call_of_a_weight_sync_is_of_its_version_and_it_is_settled_on_every_rank(tmp_path: Path) -> None:
    """Law: the conductor compares the digests of all senders with what the engine holds."""
    (table, state), wire = model(), FakeWire()
    engine = FakeEngine("http://a", table, wire)
    told, outcomes = by_two_senders(engine, TensorTransport(), tmp_path, serialize=wire.serialize)
    assert told == [["begin 3", "deliver 3", "finish 3 with 2", "settle"], ["begin 3", "deliver 3", "settle"]]
    assert isinstance(outcomes[0], dict) and outcomes[0] == outcomes[1]
    assert engine.versions == {3} and engine.loaded.keys() == state.keys() and engine.log[-1] == "resume"
    engine.fail_at = "checksums"
    told, outcomes = by_two_senders(engine, TensorTransport(), tmp_path, serialize=wire.serialize)
    assert [one[-1] for one in told] == ["abandon", "abandon"]
    assert all(isinstance(outcome, EngineError) for outcome in outcomes)


@pytest.mark.parametrize("keep", [False, True])
def test_a_version_on_disk_is_of_all_senders_and_goes_when_engines_have_it(tmp_path: Path, keep: bool) -> None:
    """Law: the user's function gets the whole folder, and where the engines are, before they load it."""
    (table, state), wire, seen = model(), FakeWire(), list[Any]()
    engine, folder = FakeEngine("http://a", table, wire), tmp_path / "versions"
    transport = DiskTransport(**vars(disk_settings(folder, update_weight_disk_keep_files=keep)))

    def post_write(version: Path, engines: Sequence[str]) -> None:
        seen.append(
            (version, list(engines), (version / "model.safetensors.index.json").exists(), engine.versions.copy())
        )

    _, outcomes = by_two_senders(engine, transport, tmp_path, post_write=post_write)
    assert isinstance(outcomes[0], dict), outcomes
    assert seen == [(folder / "weight_v000003", ["http://a"], True, set())]
    assert engine.versions == {3} and all(torch.equal(engine.loaded[name], tensor) for name, tensor in state.items())
    assert [path.name for path in folder.iterdir()] == ["weight_v000003"] * keep


def three_engines(lost: str = "") -> list[Receiver]:
    """Engines a, b and c; the supervisor has given one up."""
    table, _ = model()
    engines: list[Any] = [FakeEngine(f"http://{c}", table, FakeWire()) for c in "abc"]
    return [Receiver(engine, is_lost=lambda url=engine.url: url == lost) for engine in engines]  # type: ignore[misc]


def test_errors_of_several_engines_are_told_together() -> None:
    def silent(control: Any) -> None:
        if control.url != "http://c":
            raise DeadlineExceeded.waiting(owner="weight sync", for_what=control.url, limit_s=1)

    with pytest.raises(DeadlineExceeded, match=r"(?s)http://a.*http://b") as caught:
        on_all(three_engines(), silent, "answer")
    assert caught.value.engines == ("http://a", "http://b")


@pytest.mark.parametrize("lost", ["", "http://b"])
def test_an_engine_that_is_lost_and_those_that_wait_for_another_one_hold_nobody_up(
    monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Law: blamed are those that failed, and the lost one, not those that never answer without them."""
    monkeypatch.setattr(receivers_module, "GRACE_S", 0.0)
    over = threading.Event()

    def one_fails(control: Any) -> None:
        if control.url == "http://a" and not lost:
            raise EngineError("no room")
        over.wait()

    with pytest.raises(EngineError, match=r"lost before it could answer" if lost else "no room") as caught:
        on_all(three_engines(lost), one_fails, "answer")
    over.set()
    assert caught.value.engines == (lost or "http://a",)


def test_who_holds_other_weights_is_named_and_an_error_keeps_its_engines_between_processes() -> None:
    table, state = model()
    wire = FakeWire()
    engines = [FakeEngine("http://a", table, wire), FakeEngine("http://b", table, wire, TP2)]
    engines[1].drop = "model.norm.weight"
    with pytest.raises(WeightSyncError) as caught:
        run(table, state, engines, wire)
    assert pickle.loads(pickle.dumps(caught.value)).engines == ("http://b",)


REFUSING_ENGINE = """
import sys, threading
from datetime import timedelta
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
port, name = int(sys.argv[1]), sys.argv[2]
limit = timedelta(seconds=60)
store = c10d.PrefixStore(name, dist.TCPStore("127.0.0.1", port, 2, False, timeout=limit))
print("here", flush=True)
c10d._new_process_group_helper(2, 1, [], c10d.Backend("gloo"), store, group_name=name, timeout=limit)
threading.Event().wait(60)
"""


class RefusingEngine(FakeEngine):
    """Joins the group (a process of its own, which never receives), then refuses the broadcast."""

    process: subprocess.Popen[bytes] | None = None

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.has_begun = threading.Event()

    def init_weights_update_group(self, *, master_port: int, group_name: str, **rest: Any) -> None:
        words = [sys.executable, "-c", REFUSING_ENGINE, str(master_port), group_name]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE)
        self.has_begun.set()

    def wait_until_it_joins(self) -> None:
        """Answers when its process is with the store of the group."""
        self.has_begun.wait()
        assert self.process is not None and self.process.stdout is not None
        self.process.stdout.readline()

    def destroy_weights_update_group(self, *, group_name: str) -> None:
        raise EngineError("gone")

    def update_weights_from_distributed(self, **update: Any) -> None:
        raise EngineError("no room for these weights")


class AbsentEngine(RefusingEngine):
    """Never comes to the group, and says so when another one has come."""

    other: RefusingEngine

    def init_weights_update_group(self, *, master_port: int, group_name: str, **rest: Any) -> None:
        self.other.wait_until_it_joins()
        raise EngineError("no such backend")


def test_an_engine_that_does_not_come_to_the_group_keeps_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the sender learns who refused, and those who have come are let go, long before the limit."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    table, state = model()
    here, absent = RefusingEngine("http://a", table, FakeWire()), AbsentEngine("http://b", table, FakeWire())
    absent.other = here
    try:
        with pytest.raises(EngineError, match="no such backend") as caught:
            sync_weights(
                Whole(table, state.items()),
                receivers=[Receiver(here), Receiver(absent)],  # type: ignore[arg-type]
                channel=DistributedTransport().open(transport_context(timeout_s=10_000)),
                digest=digest,
                version=1,
                buffer_bytes=1 << 30,
            )
        assert caught.value.engines == ("http://b",)
        assert here.process is not None
        here.process.wait()
    finally:
        if here.process is not None:
            here.process.kill()
            here.process.wait()


def test_a_refusal_during_broadcasts_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as the channel would for the rest of the process
    table, state = model(vocab_size=200_000)  # large enough that gloo cannot buffer it
    engine = RefusingEngine("http://a", table, FakeWire())
    started = time.monotonic()
    try:
        with pytest.raises(EngineError, match="no room"):
            sync_weights(
                Whole(table, state.items()),
                receivers=[Receiver(engine)],  # type: ignore[arg-type]
                channel=DistributedTransport().open(transport_context(timeout_s=200)),
                digest=digest,
                version=1,
                buffer_bytes=1 << 30,
            )
        assert time.monotonic() - started < 100
    finally:
        if engine.process is not None:
            engine.process.kill()
            engine.process.wait()


def test_every_moment_of_a_pause_has_one_cause() -> None:
    now = iter([10.0, 11.0, 11.5, 14.0, 16.0, 16.25])
    causes = PauseCauses(num_gpus=4, clock=lambda: next(now))
    causes.end("abort")  # nothing is paused yet
    causes.begin()
    for cause in CAUSES:
        causes.end(cause)
    metrics = causes.metrics()
    assert [metrics[f"{PAUSED}/{cause}"] for cause in CAUSES] == [4.0, 2.0, 10.0, 8.0, 1.0]
    assert metrics[PAUSED] == 25.0 == 4 * (16.25 - 10.0)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_sync_reports_gpu_seconds_of_all_engines_by_cause(mode: str) -> None:
    table, state = model()
    wire = FakeWire()
    engines = [FakeEngine(f"http://{i}", table, wire, layout) for i, layout in enumerate((ONE_RANK, TP2, PP2))]
    metrics = run(table, state, engines, wire, pause_mode=mode)
    parts = [metrics[f"{PAUSED}/{cause}"] for cause in CAUSES]
    assert metrics[PAUSED] == pytest.approx(sum(parts)) and all(part > 0 for part in parts if mode == "abort")
    assert metrics[PAUSED] <= 5 * metrics["update_weights_time"], "one GPU of the first engine, two of each other"
    assert metrics[PAUSED] >= 5 * (metrics["update_weights_pause_time"] + metrics["update_weights_verify_time"]) * 0.999
