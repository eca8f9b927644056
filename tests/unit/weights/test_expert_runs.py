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

from slime.serving.payloads import digest, serialize_bucket, shareable
from slime.weights.expert_runs import load, named_runs, places_of
from slime.weights.hf_shards import byte_runs
from slime.weights.send_plan import Buffers
from tests.support.weights import State, Whole, engine_tensors, model

MOE: dict[str, Any] = {"model_type": "qwen3_moe", "num_experts": 5, "moe_intermediate_size": 32}
TABLE, STATE = model(**MOE)


class FakeModel:
    """An engine's model: resident experts, and a loader for whatever else comes."""

    def __init__(self, resident: State) -> None:
        self._resident, self.others = resident, dict[str, torch.Tensor]()

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._resident[name]

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """Experts one by one, to where this model has them."""
        for name, tensor in named:
            self.others[name] = tensor.clone()
            if ".experts." not in name:
                continue
            resident = self._resident[TABLE.resident_of[name]]
            part = {"gate_proj": 0, "up_proj": 1, "down_proj": 0}[name.split(".")[-2]]
            self.place(resident[int(name.split(".")[-3])], part, tensor)

    def place(self, expert: torch.Tensor, part: int, tensor: torch.Tensor) -> None:
        expert[part * len(tensor) : (part + 1) * len(tensor)] = tensor


class UpFirst(FakeModel):
    """An engine that keeps up before gate."""

    def place(self, expert: torch.Tensor, part: int, tensor: torch.Tensor) -> None:
        super().place(expert, 1 - part if 2 * len(tensor) == len(expert) else 0, tensor)


class Transposed(FakeModel):
    """An engine that keeps each expert transposed."""

    def place(self, expert: torch.Tensor, part: int, tensor: torch.Tensor) -> None:
        super().place(expert.T, part, tensor)


def shaped(stacked: torch.Tensor) -> torch.Tensor:
    """[experts x out, in] -> [experts, out, in]."""
    return stacked.unflatten(0, (MOE["num_experts"], -1))


def sent(engine: FakeModel, limit: int) -> None:
    """All weights, in buckets of at most `limit` bytes."""
    places, outgoing = places_of(TABLE, on_cpu=True), Whole(TABLE, STATE.items())
    buffers = Buffers(lambda num_bytes: shareable(num_bytes, outgoing.device))
    for turn in outgoing.turns(limit):
        bucket = buffers.next(turn.specs)
        for (_, tensor), (_, view) in zip(outgoing.tensors(turn), bucket.tensors, strict=True):
            view.copy_(tensor)
        payloads, _ = serialize_bucket(bucket.tensors, 1, runs=named_runs(bucket.tensors, places))
        load(engine, opened(payloads[0]))


def opened(payload: str) -> list[tuple[str, torch.Tensor]]:
    """As a receiver in another process reads it."""
    return pickle.load(io.BytesIO(b64decode(payload)))


@given(st.integers(1, 60_000))
def test_runs_fill_what_an_engine_holds_whatever_the_buckets(limit: int) -> None:
    places = places_of(TABLE, on_cpu=True)
    want = dict(engine_tensors(TABLE, STATE, on_cpu=True))
    stacks = {resident for resident, _ in places.values()}
    assert len(stacks) == 4, "two of each layer"
    engine = FakeModel({name: torch.full_like(shaped(want[name]), torch.nan) for name in stacks})
    sent(engine, limit)
    for name in stacks:
        assert torch.equal(engine.get_parameter(name), shaped(want[name])), name
    assert engine.others.keys() == STATE.keys() - places.keys()
    assert any(".experts.0." in name for name in engine.others), "the first ones are loaded by the model itself"
    assert all(torch.equal(tensor, STATE[name]) for name, tensor in engine.others.items())


@pytest.mark.parametrize("kind, limit", [(UpFirst, 10**6), (UpFirst, 5000), (Transposed, 10**6), (Transposed, 5000)])
def test_an_engine_that_keeps_experts_otherwise_does_not_report_what_was_meant(
    kind: type[FakeModel], limit: int
) -> None:
    """Bytes that were put where the trainer has them prove nothing by themselves."""
    want = dict(engine_tensors(TABLE, STATE, on_cpu=True))
    stacks = {resident for resident, _ in places_of(TABLE, on_cpu=True).values()}
    empty = {name: shaped(want[name]) for name in stacks}
    if kind is Transposed:
        empty = {name: tensor.transpose(1, 2).contiguous() for name, tensor in empty.items()}
    engine = kind({name: torch.zeros_like(tensor) for name, tensor in empty.items()})
    sent(engine, limit)
    wrong = {name for name in stacks if digest(engine.get_parameter(name)) != digest(want[name])}
    assert wrong == (stacks if kind is Transposed else {name for name in stacks if "w13" in name})


def test_a_bucket_of_neighbours_is_one_run() -> None:
    places = places_of(TABLE, on_cpu=True)
    experts = [(name, tensor) for name, tensor in STATE.items() if name in places and ".0.mlp." in name]
    names = [name for name, _ in named_runs(experts, places)]
    first = {
        what: sum(STATE[f"model.layers.0.mlp.experts.0.{p}_proj.weight"].numel() for p in parts)
        for what, parts in (("w13", ("gate", "up")), ("w2", ("down",)))
    }
    assert names == [f"model.layers.0.mlp.experts.{what}_weight@{start}" for what, start in first.items()]
    backwards = named_runs(experts[::-1], places)
    assert len(backwards) == len(experts), "out of order, each is where it belongs, by itself"


@pytest.mark.parametrize("features, on_cpu, whole", [(32, True, True), (36, True, False), (36, False, True)])
def test_experts_that_an_engine_would_pad_go_to_its_own_loader(features: int, on_cpu: bool, whole: bool) -> None:
    table, state = model(**{**MOE, "moe_intermediate_size": features})
    places = places_of(table, on_cpu=on_cpu)
    assert bool(places) is whole
    if whole:
        want = dict(engine_tensors(table, state, on_cpu=on_cpu))
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
