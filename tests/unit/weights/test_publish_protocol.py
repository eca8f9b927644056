"""Laws of the publication that need no engine: layouts, comparison, the order of the protocol, agreement of ranks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from slime.core.errors import ConfigError, DeadlineExceeded, EngineError, WeightSyncError
from slime.core.ports import RankChecksums
from slime.serving.wire import digest
from slime.weights.buckets import Bucket, cut
from slime.weights.engine_layout import ExpectedDigests, engine_pieces, engine_tensors, padded_vocab_size
from slime.weights.publish import publish
from slime.weights.tables import FamilyTable, table_for
from slime.weights.targets import EngineTarget, Peers
from slime.weights.transports import DistributedTransport, TensorTransport
from slime.weights.verify import compare

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_size": 20,
    "intermediate_size": 36,
    "vocab_size": 70,
}
State = dict[str, torch.Tensor]


def model(**changes: Any) -> tuple[FamilyTable, State]:
    table = table_for({**CONFIG, **changes})
    generator = torch.Generator().manual_seed(0)
    return table, {n: torch.randn(table.hf_shape(n), generator=generator) for n in table.hf_names}


def engine_shard(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.cat(engine_pieces(*args, **kwargs))


class FakeEngine:
    """An engine that loads what it is given (by reference, through `FakeWire`) into its own idea of the layout."""

    def __init__(self, url: str, table: FamilyTable, wire: FakeWire, tp_size: int = 1) -> None:
        self.url, self.tp_size = url, tp_size
        self.table, self.wire = table, wire
        self.log: list[str] = []
        self.loaded: State = {}
        self.fail_at: str | None = None
        self.drop: str | None = None

    def _did(self, what: str) -> None:
        if self.fail_at == what:
            raise EngineError(f"{self.url} refuses to {what}")
        self.log.append(what)

    def pause(self, mode: str = "abort") -> None:
        self._did(f"pause {mode}")

    def resume(self) -> None:
        self._did("resume")

    def flush_cache(self) -> None:
        self._did("flush")

    def update_weights_from_tensor(self, payloads: Sequence[str], **update: Any) -> None:
        assert update["flush_cache"] is False
        assert len(set(payloads)) == self.tp_size, "ranks must not share a payload"
        self._did("update")
        self.loaded.update(self.wire.open(payloads[0]))

    def weight_checksums(self) -> list[RankChecksums]:
        self._did("checksums")
        ranks = []
        for rank in range(self.tp_size):
            tensors = dict(engine_tensors(self.table, self.loaded, tp_rank=rank, tp_size=self.tp_size, on_cpu=True))
            tensors.pop(self.drop or "", None)
            ranks.append(RankChecksums(rank, self.tp_size, {n: digest(t) for n, t in tensors.items()}))
        return ranks


class FakeWire:
    """Keeps buckets by ticket; counts what is alive."""

    def __init__(self) -> None:
        self.tickets: dict[str, tuple[tuple[str, torch.Tensor], ...]] = {}

    def serialize(self, tensors: Any, num: int, reuse: object = None) -> tuple[list[str], object]:
        names = [f"ticket-{len(self.tickets) + i}" for i in range(num)]
        self.tickets.update({n: tuple((k, t.clone()) for k, t in tensors) for n in names})
        return names, None

    def open(self, ticket: str) -> State:
        return dict(self.tickets[ticket])


def run(table: FamilyTable, state: State, engines: list[FakeEngine], wire: FakeWire, **kwargs: Any) -> dict[str, float]:
    peers = kwargs.pop("peers", Peers())
    transport = TensorTransport(wire.serialize, peers, tamper=kwargs.pop("tamper", None))
    return publish(
        iter(state.items()),
        table=table,
        targets=[EngineTarget(e) for e in engines],  # type: ignore[arg-type]
        transport=transport,
        digest=digest,
        version=3,
        buffer_bytes=4096,
        peers=peers,
        **kwargs,
    )


@pytest.mark.parametrize("on_cpu", [True, False])
def test_engine_shards_hold_every_value_once_and_zeros_beside(on_cpu: bool) -> None:
    table, state = model()
    for tp_size in (1, 2):
        for entry in table.entries:
            parts = [state[n] for n in entry.hf]
            shards = [
                engine_shard(table, entry, parts, tp_rank=r, tp_size=tp_size, on_cpu=on_cpu) for r in range(tp_size)
            ]
            assert all(s.shape == shards[0].shape for s in shards)
            got = torch.cat([s.flatten() for s in shards])
            want = torch.cat([p.flatten() for p in parts] * (tp_size if entry.kind.value == "copy" else 1))
            assert torch.equal(got[got != 0].sort().values, want.sort().values), entry
            if not on_cpu and entry.kind.value != "vocab":
                assert got.numel() == want.numel()


def test_a_gpu_replicates_kv_heads_when_there_are_fewer_than_ranks() -> None:
    table, state = model()
    entry = table.entry("decoder.layers.0.self_attention.linear_qkv.weight")
    parts = [state[n] for n in entry.hf]
    for rank in range(4):
        shard = engine_shard(table, entry, parts, tp_rank=rank, tp_size=4, on_cpu=False)
        head = rank // 2
        want = [parts[0][6 * rank : 6 * rank + 6], *(p[6 * head : 6 * head + 6] for p in parts[1:])]
        assert torch.equal(shard, torch.cat(want))
    with pytest.raises(ConfigError, match="3 ranks"):
        engine_shard(table, entry, parts, tp_rank=0, tp_size=3, on_cpu=False)


def test_a_cpu_pads_heads_and_mlp_with_zeros() -> None:
    table, state = model()

    def shard(name: str, rank: int) -> torch.Tensor:
        entry = table.entry(f"decoder.layers.0.{name}.weight")
        return engine_shard(table, entry, [state[n] for n in entry.hf], tp_rank=rank, tp_size=4, on_cpu=True)

    prefix = "model.layers.0."
    q, k = state[f"{prefix}self_attn.q_proj.weight"], state[f"{prefix}self_attn.k_proj.weight"]
    qkv = shard("self_attention.linear_qkv", 1)  # 2 KV heads become 4, so each rank has one and two query heads
    assert qkv.shape[0] == 4 * 6 and torch.equal(qkv[:12], q[12:24]) and torch.equal(qkv[12:18], k[6:12])
    assert not shard("self_attention.linear_qkv", 3).any()
    assert shard("self_attention.linear_proj", 1).shape == (20, 12)
    fc1 = shard("mlp.linear_fc1", 1)  # 36 features become 128, so rank 1 has the last 4
    up = state[f"{prefix}mlp.up_proj.weight"]
    assert fc1.shape[0] == 64 and torch.equal(fc1[32:36], up[32:]) and not fc1[36:].any()


def test_vocabulary_is_padded_to_64_and_more_only_where_ranks_need_it() -> None:
    assert [padded_vocab_size(v, 1) for v in (64, 65, 128)] == [64, 128, 128]
    assert padded_vocab_size(64, 2) == 64 and padded_vocab_size(64, 3) == 192


def test_buckets_hold_the_limit_the_order_and_one_dtype() -> None:
    tensors = [(str(i), torch.zeros(n)) for i, n in enumerate((10, 10, 100, 5, 5))]
    tensors.append(("half", torch.zeros(1, dtype=torch.bfloat16)))
    buckets = list(cut(iter(tensors), 80))
    assert [[n for n, _ in b.tensors] for b in buckets] == [["0", "1"], ["2"], ["3", "4"], ["half"]]
    assert all(b.num_bytes <= 80 for b in buckets if len(b.tensors) > 1)


def test_the_hook_for_faults_never_sees_the_trainers_own_tensor() -> None:
    own = torch.ones(3)
    sent = Bucket((("a", own),)).tampered(lambda _, t: t.mul_(2))
    assert own.tolist() == [1, 1, 1] and sent.tensors[0][1].tolist() == [2, 2, 2]


def test_comparison_names_missing_extra_and_differing() -> None:
    difference = compare({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "0", "d": "4"})
    assert (difference.missing, difference.extra, difference.differing) == (("c",), ("d",), ("b",))
    assert difference and difference.num_equal == 1 and not compare({"a": "1"}, {"a": "1"})


def test_doubled_missing_and_misshapen_tensors_are_refused() -> None:
    table, state = model()
    expected = ExpectedDigests(table, [1], digest)
    expected.add("model.norm.weight", state["model.norm.weight"])
    with pytest.raises(WeightSyncError, match="twice"):
        expected.add("model.norm.weight", state["model.norm.weight"])
    with pytest.raises(WeightSyncError, match="shape"):
        expected.add("lm_head.weight", state["lm_head.weight"][1:])
    with pytest.raises(WeightSyncError, match="without"):
        expected.finish()


def test_the_protocol_pauses_drains_updates_verifies_then_resumes() -> None:
    table, state = model()
    wire = FakeWire()
    engines = [FakeEngine("http://a", table, wire, 1), FakeEngine("http://b", table, wire, 2)]
    metrics = run(table, state, engines, wire)
    for engine in engines:
        steps = [s for i, s in enumerate(engine.log) if engine.log[i - 1 : i] != [s]]
        assert steps == ["pause abort", "flush", "update", "checksums", "resume"]
    assert metrics["update_weights_bytes"] == sum(t.numel() * 4 for t in state.values())


def test_every_departure_is_named_and_no_engine_resumes() -> None:
    table, state = model()
    wire = FakeWire()
    engines = [FakeEngine("http://a", table, wire), FakeEngine("http://b", table, wire, 2)]
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


@pytest.mark.parametrize("step", ["pause abort", "flush", "update", "checksums"])
def test_a_failing_engine_leaves_all_paused_and_the_stream_is_walked_to_its_end(step: str) -> None:
    table, state = model()
    wire = FakeWire()
    engines = [FakeEngine("http://a", table, wire), FakeEngine("http://b", table, wire)]
    engines[1].fail_at = step
    walked: list[str] = []

    def stream() -> Any:
        for item in state.items():
            walked.append(item[0])
            yield item

    with pytest.raises(EngineError, match="http://b refuses"):
        publish(
            stream(),
            table=table,
            targets=[EngineTarget(e) for e in engines],  # type: ignore[arg-type]
            transport=TensorTransport(wire.serialize, Peers()),
            digest=digest,
            version=1,
            buffer_bytes=4096,
        )
    assert walked == list(state), "iterating is a collective of the trainer: every rank must finish it"
    assert not any("resume" in e.log for e in engines)


class Ranks:
    """Trainer ranks as threads, with the two collectives that `Peers` needs."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=10)
        self.slots: list[Any] = [None] * size

    def peers(self, rank: int) -> Peers:
        def exchange(value: Any) -> list[Any]:
            self.slots[rank] = value
            self.barrier.wait()
            out = list(self.slots)
            self.barrier.wait()
            return out

        return Peers(
            is_sender=rank == 0,
            broadcast=lambda v: exchange(v)[0],
            gather=lambda v: out if (out := exchange(v)) and rank == 0 else None,
        )


@pytest.mark.parametrize("broken", [None, "update", "serialize"])
def test_all_trainer_ranks_agree_and_each_gpu_is_served_by_its_own_rank(broken: str | None) -> None:
    table, state = model()
    ranks, wires = Ranks(2), [FakeWire(), FakeWire()]
    shared = FakeWire()
    engine = FakeEngine("http://a", table, shared, 2)
    target = EngineTarget(engine, gpu_ids=("g1", "g0"))  # type: ignore[arg-type]
    engine.fail_at = broken
    seen: list[list[str]] = []
    outcomes: list[Any] = [None, None]

    def member(rank: int) -> None:
        def serialize(tensors: Any, num: int, reuse: object) -> tuple[list[str], object]:
            assert reuse is None, "on GPUs another rank may still be delivering the bucket before"
            if broken == "serialize" and rank == 1:
                raise RuntimeError("no handle")
            names, held = wires[rank].serialize(tensors, num)
            tickets = [f"g{rank}-{n}" for n in names]
            shared.tickets.update({t: wires[rank].tickets[n] for t, n in zip(tickets, names, strict=True)})
            return tickets, held

        transport = TensorTransport(serialize, ranks.peers(rank), gpu_id=f"g{rank}")
        try:
            outcomes[rank] = publish(
                iter(state.items()),
                table=table,
                targets=[target],
                transport=transport,
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


def test_errors_of_several_engines_are_told_together() -> None:
    from slime.weights.targets import on_all

    table, _ = model()
    engines = [FakeEngine(f"http://{c}", table, FakeWire()) for c in "ab"]
    targets = [EngineTarget(e) for e in engines]  # type: ignore[arg-type]

    def silent(control: Any) -> None:
        raise DeadlineExceeded.waiting(owner="weight sync", for_what=control.url, limit_s=1)

    with pytest.raises(DeadlineExceeded, match=r"(?s)http://a.*http://b"):
        on_all(targets, silent, "answer")


REFUSING_ENGINE = """
import sys, threading
from datetime import timedelta
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
port, name = int(sys.argv[1]), sys.argv[2]
limit = timedelta(seconds=60)
store = c10d.PrefixStore(name, dist.TCPStore("127.0.0.1", port, 2, False, timeout=limit))
c10d._new_process_group_helper(2, 1, [], c10d.Backend("gloo"), store, group_name=name, timeout=limit)
threading.Event().wait(60)
"""


class RefusingEngine(FakeEngine):
    """Joins the group (a process of its own, which never receives), then refuses the broadcast."""

    process: subprocess.Popen[bytes] | None = None

    def init_weights_update_group(self, *, master_port: int, group_name: str, **rest: Any) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", REFUSING_ENGINE, str(master_port), group_name])

    def destroy_weights_update_group(self, *, group_name: str) -> None:
        raise EngineError("gone")

    def update_weights_from_distributed(self, **update: Any) -> None:
        raise EngineError("no room for these weights")


def test_a_refusal_during_broadcasts_is_reported_at_once() -> None:
    table, state = model(vocab_size=200_000)  # large enough that gloo cannot buffer it
    engine = RefusingEngine("http://a", table, FakeWire())
    started = time.monotonic()
    try:
        with pytest.raises(EngineError, match="no room"):
            publish(
                iter(state.items()),
                table=table,
                targets=[EngineTarget(engine)],  # type: ignore[arg-type]
                transport=DistributedTransport(Peers(), backend="gloo", timeout_s=50),
                digest=digest,
                version=1,
                buffer_bytes=1 << 30,
            )
        assert time.monotonic() - started < 30
    finally:
        if engine.process is not None:
            engine.process.kill()
            engine.process.wait()
