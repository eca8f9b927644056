"""Laws of experts that travel as runs: whatever the buckets, an engine of one rank ends with the bits sent to it."""

from __future__ import annotations

import io
import pickle
from base64 import b64decode
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.serving.wire import digest, serialize_bucket
from slime.weights.buckets import split
from slime.weights.byte_runs import byte_runs
from slime.weights.expert_runs import load, named_runs, places_of
from tests.support.weights import State, engine_tensors, model

MOE: dict[str, Any] = {"model_type": "qwen3_moe", "num_experts": 5, "moe_intermediate_size": 32}
TABLE, STATE = model(**MOE)


class FakeModel:
    """An engine's model: resident experts, and a loader for whatever else comes."""

    def __init__(self, resident: State) -> None:
        self._resident, self.others = resident, dict[str, torch.Tensor]()

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._resident[name]

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self.others.update({name: tensor.clone() for name, tensor in named})


def opened(payload: str) -> list[tuple[str, torch.Tensor]]:
    """As a receiver in another process reads it."""
    return pickle.load(io.BytesIO(b64decode(payload)))


@given(st.integers(1, 60_000))
def test_runs_fill_what_an_engine_holds_whatever_the_buckets(limit: int) -> None:
    places = places_of(TABLE, on_cpu=True)
    want = dict(engine_tensors(TABLE, STATE, tp_rank=0, tp_size=1, on_cpu=True))
    stacks = {resident for resident, _ in places.values()}
    assert len(stacks) == 4, "two of each layer"
    engine = FakeModel({name: torch.full_like(want[name], torch.nan) for name in stacks})
    reuse: object = None
    for bucket in split(STATE.items(), limit):
        runs = named_runs(bucket.tensors, places)
        payloads, reuse = serialize_bucket(bucket.tensors, 1, reuse, runs)
        load(engine, opened(payloads[0]))
    for name in stacks:
        assert torch.equal(engine.get_parameter(name), want[name]), name
    assert engine.others.keys() == STATE.keys() - places.keys()
    assert all(torch.equal(tensor, STATE[name]) for name, tensor in engine.others.items())


def test_a_bucket_of_neighbours_is_one_run() -> None:
    places = places_of(TABLE, on_cpu=True)
    experts = [(name, tensor) for name, tensor in STATE.items() if name in places and ".0.mlp." in name]
    names = [name for name, _ in named_runs(experts, places)]
    assert names == ["model.layers.0.mlp.experts.w13_weight@0", "model.layers.0.mlp.experts.w2_weight@0"]
    backwards = named_runs(experts[::-1], places)
    assert len(backwards) == len(experts), "out of order, each is where it belongs, by itself"


@pytest.mark.parametrize("features, on_cpu, whole", [(32, True, True), (36, True, False), (36, False, True)])
def test_experts_that_an_engine_would_pad_go_to_its_own_loader(features: int, on_cpu: bool, whole: bool) -> None:
    table, state = model(**{**MOE, "moe_intermediate_size": features})
    places = places_of(table, on_cpu=on_cpu)
    assert bool(places) is whole
    if whole:
        want = dict(engine_tensors(table, state, tp_rank=0, tp_size=1, on_cpu=on_cpu))
        for name, (resident, start) in places.items():
            flat = want[resident].flatten()[start : start + state[name].numel()]
            assert torch.equal(flat, state[name].flatten()), name


def test_a_dense_model_has_no_runs() -> None:
    table, _ = model()
    assert not places_of(table, on_cpu=True)


@given(st.data())
def test_bytes_of_neighbours_are_one_view_and_all_bytes_stay(data: st.DataObject) -> None:
    stack = torch.randn(6, 4, 3)
    kinds = {
        "rows": lambda: list(stack[: data.draw(st.integers(1, 6))]),
        "columns": lambda: [stack[:, :, 1]],
        "other": lambda: [torch.randn(5)],
        "ints": lambda: [torch.arange(3)],
    }
    parts = [t for kind in data.draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1)) for t in kinds[kind]()]
    runs = byte_runs(parts)
    want = b"".join(t.contiguous().numpy().tobytes() for t in parts)
    assert b"".join(r.numpy().tobytes() for r in runs) == want
    assert digest(parts) == digest([t.clone() for t in parts])
    assert len(byte_runs(list(stack))) == 1
