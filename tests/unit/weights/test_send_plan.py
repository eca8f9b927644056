"""Laws of the order of a weight sync, and of the memory that buckets are filled in."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.core.errors import EngineError
from slime.core.topology import EngineLayout
from slime.serving.payloads import digest
from slime.weights.receivers import Receiver
from slime.weights.send_plan import MAX_SENDERS, Bucket, Buffers, Spec, Turn
from slime.weights.sync import sync_weights
from slime.weights.transports.tensor import TensorTransport
from tests.support.weights import FakeEngine, FakeWire, Ranks, Whole, model, transport_context

MOE = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 12, "num_hidden_layers": 5}
TABLE, STATE = model(**MOE)


@given(limit=st.integers(1, 200_000), num=st.integers(1, 6))
def test_every_tensor_has_one_turn_and_what_an_engine_stacks_one_sender(limit: int, num: int) -> None:
    turns = Whole(TABLE, STATE.items(), senders=[range(num)]).turns(limit)
    order = [spec.name for turn in turns for spec in turn.specs]
    assert order == list(TABLE.hf_names)
    assert all(turn.num_bytes <= limit for turn in turns if len(turn.groups) > 1)
    senders: dict[str, set[int]] = {}
    for turn in turns:
        for spec in turn.specs:
            senders.setdefault(TABLE.resident_of[spec.name], set()).add(turn.sender)
    assert all(len(ranks) == 1 for ranks in senders.values())
    assert {turn.sender for turn in turns} <= set(range(min(num, MAX_SENDERS)))


def test_several_senders_all_get_turns_and_one_has_full_buckets() -> None:
    shared = Whole(TABLE, STATE.items(), senders=[range(3)]).turns(4096)
    assert {turn.sender for turn in shared} == {0, 1, 2}
    alone = Whole(TABLE, STATE.items()).turns(1 << 30)
    assert len(alone) == 1, "whatever fits goes together"


def test_what_an_engine_loads_at_once_is_in_one_bucket() -> None:
    table, state = model(model_type="deepseek_v3", **LATENT)
    for turn in Whole(table, state.items()).turns(1):
        names = {table.together[spec.name] for spec in turn.specs if spec.name in table.together}
        assert len(names) <= 1 and (len(turn.groups) == 1 or names)
    together = [[n for n in (table.together.get(s.name) for s in turn.specs) if n] for turn in _turns(table, state)]
    assert sorted(len(names) for names in together if names) == [2] * len(set(table.together.values()))


LATENT: dict[str, Any] = {
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


def _turns(table: Any, state: Any) -> list[Turn]:
    return list(Whole(table, state.items()).turns(1))


@given(st.lists(st.tuples(st.sampled_from([torch.float8_e4m3fn, torch.bfloat16, torch.float32]), st.integers(1, 9))))
def test_tensors_lie_end_to_end_each_where_its_type_may(kinds: list[tuple[torch.dtype, int]]) -> None:
    specs = [Spec(str(i), (n,), dtype) for i, (dtype, n) in enumerate(kinds)]
    memory = torch.arange(sum(spec.num_bytes for spec in specs)) % 251
    bucket = Bucket.of(specs, memory.to(torch.uint8))
    assert sorted(name for name, _ in bucket.tensors) == sorted(spec.name for spec in specs)
    if specs:
        assert torch.equal(bucket.flat, memory.to(torch.uint8))


def test_memory_is_filled_again_when_its_bucket_is_the_last_but_one() -> None:
    made: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        made.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    buffers = Buffers(allocate)
    places = [buffers.next([Spec("a", (n,), torch.float32)]).flat.data_ptr() for n in (5, 5, 4, 5, 3)]
    assert made == [20, 20] and places[0] == places[2] == places[4] != places[1] == places[3]


@pytest.mark.parametrize("fails_at", [None, 0, 2])
def test_senders_deliver_in_turn_and_after_a_failure_nobody_does(fails_at: int | None) -> None:
    """Law: engines get buckets in the order of the turns, whoever sends them, and agree with all of it or none."""
    ranks, wire = Ranks(3, limit_s=200), FakeWire()
    engine = FakeEngine("http://a", TABLE, wire, EngineLayout(tp_size=2))
    turns = Whole(TABLE, STATE.items(), senders=[range(3)]).turns(4096)
    got: list[str] = []
    update = engine.update_weights_from_tensor

    def counted(payloads: Any, **rest: Any) -> None:
        if fails_at is not None and len(got) == fails_at:
            raise EngineError("no room")
        got.append(next(iter(wire.open(payloads[0]))))
        update(payloads, **rest)

    engine.update_weights_from_tensor = counted  # type: ignore[method-assign]
    outcomes: list[Any] = [None] * 3

    def member(rank: int) -> None:
        peers = ranks.peers(rank)
        try:
            outcomes[rank] = sync_weights(
                Whole(TABLE, STATE.items(), rank=rank, senders=[range(3)]),
                receivers=[Receiver(engine)],  # type: ignore[arg-type]
                channel=TensorTransport().open(transport_context(serialize=wire.serialize, peers=peers, table=TABLE)),
                digest=digest,
                version=1,
                buffer_bytes=4096,
                peers=peers,
            )
        except EngineError as error:
            outcomes[rank] = str(error)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    assert outcomes[0] is not None and outcomes[0] == outcomes[1] == outcomes[2]
    assert got == [turn.specs[0].name for turn in turns][:fails_at]
    assert ("resume" in engine.log) is (fails_at is None)
    if fails_at is None:
        assert outcomes[0]["update_weights_bytes"] == sum(t.nbytes for t in STATE.values())
