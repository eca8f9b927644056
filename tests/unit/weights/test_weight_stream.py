"""An engine that receives announced buckets: what it loads, and when it repeats copies or asks the loader again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch import Tensor, nn

from slime.compat.sglang_weight_stream import Loads, _announced, _loads_of, buckets_of, recorded
from slime.core.engine_interface import stream_format
from slime.core.errors import EngineError
from slime.weights.send_plan import Bucket, Spec

DTYPES = torch.float32, torch.bfloat16, torch.uint8, torch.int64
SHAPES: dict[str, tuple[int, ...]] = {"q": (4, 6), "k": (2, 6), "v": (2, 6), "gate": (5, 6), "up": (5, 6), "norm": (6,)}
PARTS = {"q": ("qkv", 0), "k": ("qkv", 4), "v": ("qkv", 6), "gate": ("gate_up", 0), "up": ("gate_up", 5)}


class Fused(nn.Module):
    """Keeps q, k, v and gate, up stacked, as engines do; `shard` of `shards` holds some of the columns of a stack."""

    def __init__(self, shard: int = 0, shards: int = 1) -> None:
        super().__init__()
        self._columns = slice(6 * shard // shards, 6 * (shard + 1) // shards)
        width = 6 // shards
        self.qkv, self.gate_up, self.norm = (nn.Parameter(torch.zeros(s)) for s in ((8, width), (10, width), (6,)))
        self.asked = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.asked += 1
        for name, tensor in weights:
            if name not in PARTS:
                self.get_parameter(name).data.copy_(tensor)
                continue
            stack, row = PARTS[name]
            self.get_parameter(stack).data.narrow(0, row, len(tensor)).copy_(tensor[:, self._columns])


class Derived(Fused):
    """Computes one more tensor from its weights whenever they are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("doubled", torch.zeros(6))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(weights)
        self.doubled = self.norm.data * 2


class Padded(Fused):
    """Fills memory with zeros: behind the norm (as a padded vocabulary), or, if `wrong`, over what it has copied."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.norm, self._wrong = nn.Parameter(torch.ones(9)), wrong

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        state = dict(weights)
        self.norm.data[:6].copy_(state.pop("norm"))
        super().load_weights(state.items())
        self.norm.data[5 if self._wrong else 6 :].fill_(0)


def announced(*groups: str) -> list[tuple[Spec, ...]]:
    names = [name for group in groups for name in group.split()]
    numbers = ",".join(str(len(group.split())) for group in groups)
    return list(buckets_of(names, ["float32"] * len(names), [SHAPES[name] for name in names], numbers))


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sync(loads: Loads, state: dict[str, Tensor], buckets: list[tuple[Spec, ...]]) -> None:
    loads.begin()
    for specs in buckets:
        flat = torch.zeros(sum(spec.num_bytes for spec in specs), dtype=torch.uint8)
        for name, tensor in Bucket.of(specs, flat).tensors:
            tensor.copy_(state[name])
        loads.load(specs, flat)


def loaded(kind: type[Fused], state: dict[str, Tensor], *given: Any) -> dict[str, Tensor]:
    model = kind(*given)
    model.load_weights(state.items())
    return model.state_dict()


BUCKETS = announced("q k v", "norm gate", "up")


@pytest.mark.parametrize("given", [(), (0, 2), (1, 2)])
def test_repeated_copies_give_what_the_models_own_loader_gives(given: tuple[int, ...]) -> None:
    """Law: whatever the weights and the layout, and the loader is asked once per bucket."""
    model = Fused(*given)
    loads = Loads(model)
    for seed in range(4):
        sync(loads, weights(seed), BUCKETS)
        for name, tensor in loaded(Fused, weights(seed), *given).items():
            assert torch.equal(model.get_parameter(name), tensor), name
    assert model.asked == len(BUCKETS)


def test_a_model_that_derives_tensors_is_loaded_by_its_loader_every_time() -> None:
    model = Derived()
    loads = Loads(model)
    for seed in range(3):
        sync(loads, weights(seed), BUCKETS)
        assert torch.equal(model.doubled, 2 * weights(seed)["norm"])
    assert model.asked == 3 * len(BUCKETS)


@pytest.mark.parametrize("wrong", [False, True])
def test_constants_beside_the_copies_stay_and_over_them_need_the_loader(wrong: bool) -> None:
    model = Padded(wrong)
    loads = Loads(model)
    for seed in range(3):
        sync(loads, weights(seed), announced("norm up"))
        assert model.norm[6:].eq(0).all() and torch.equal(model.norm[:5], weights(seed)["norm"][:5])
        assert (model.norm[5] == 0) == wrong
    assert model.asked == (3 if wrong else 1) and bool(loads.others) == wrong


def test_other_buckets_and_moved_parameters_ask_the_loader_again() -> None:
    model = Fused()
    loads = Loads(model)
    sync(loads, weights(0), BUCKETS)
    sync(loads, weights(1), announced("q k", "v norm gate", "up"))
    assert model.asked == 5, "of these three buckets, the last one is known"
    model.qkv.data = torch.zeros(8, 6)
    sync(loads, weights(2), BUCKETS)
    assert model.asked == 8
    assert all(torch.equal(model.get_parameter(n), t) for n, t in loaded(Fused, weights(2)).items())


def test_a_bucket_of_two_dtypes_is_read_as_it_was_written() -> None:
    specs = next(buckets_of(["a", "b"], ["float32", torch.bfloat16], [(3,), (2, 2)], "2"))
    flat = torch.arange(20, dtype=torch.uint8)
    read = Bucket.of(specs, flat).tensors
    starts = [(name, tensor.storage_offset() * tensor.itemsize) for name, tensor in read]
    assert [(name, start, start + t.nbytes) for (name, start), (_, t) in zip(starts, read, strict=True)] == [
        ("a", 0, 12),
        ("b", 12, 20),
    ]
    assert read[1][1].shape == (2, 2) and torch.equal(read[1][1].view(-1).view(torch.uint8), flat[12:])


def test_a_call_that_lists_fewer_tensors_than_it_announces_is_refused() -> None:
    with pytest.raises(EngineError, match="announces 2 tensors, but lists 1"):
        list(buckets_of(["a"], ["float32"], [(3,)], "2"))


def test_a_list_of_tensors_is_kept_as_long_as_its_group() -> None:
    """Law: a key gives the buckets that were listed under it in that group, and no others."""
    updater: Any = SimpleNamespace(_model_update_group={"a": "group a"}, device="cpu", model=nn.Linear(1, 1))
    updater.get_model = lambda: updater.model
    listed = ["q", "k"], ["float32"] * 2, [SHAPES[name] for name in ("q", "k")]
    first = _announced(updater, *listed, "a", stream_format("one", [1, 1]))
    again = _announced(updater, [], [], [], "a", stream_format("one"))
    assert again.buckets == first.buckets and [specs[0].name for specs, _ in first.buckets] == ["q", "k"]
    assert [num_bytes for _, num_bytes in first.buckets] == [4 * math.prod(SHAPES[name]) for name in ("q", "k")]
    updater._model_update_group = {"b": "group b"}
    with pytest.raises(EngineError, match="has not got the list one"):
        _announced(updater, [], [], [], "b", stream_format("one"))
    _announced(updater, *listed, "b", stream_format("two", [2]))
    assert list(_loads_of(updater.model).lists) == [("b", "two")]


class Part(NamedTuple):
    """One copy of `size` values of a dtype, `shift` values behind the previous one on each side."""

    size: int
    shifts: tuple[int, int]
    dtype: torch.dtype = torch.float32


@drawn(
    st.lists(
        st.builds(Part, st.integers(0, 3), st.tuples(st.integers(0, 2), st.integers(0, 2)), st.sampled_from(DTYPES)),
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_joined_copies_do_the_same(parts: list[Part], random: Random) -> None:
    """The oracle is the list of copies in the order in which the loader made them. Offsets are in units of 8 bytes plus
    the dtype's size, so that the copies have all alignments."""
    flat = torch.arange(512, dtype=torch.int32).to(torch.uint8)
    into, want = torch.zeros(512, dtype=torch.uint8), torch.zeros(512, dtype=torch.uint8)

    def load(memory: Tensor) -> None:
        places, ends = [], [0, 0]
        for size, shifts, dtype in parts:
            each = dtype.itemsize
            ends = [-(-(end + shift * each) // each) * each for end, shift in zip(ends, shifts, strict=True)]
            places.append((ends[0], ends[1], size * each, dtype))
            ends = [end + size * each for end in ends]
        random.shuffle(places)
        for start, place, length, dtype in places:
            memory[place : place + length].view(dtype).copy_(flat[start : start + length].view(dtype))

    state = random.getstate()
    record = recorded(flat, lambda: load(into))
    random.setstate(state)
    load(want)
    assert torch.equal(into, want)
    into.zero_()
    for one in record.copied:
        one.into.copy_(one.source(flat))
    assert torch.equal(into, want)


def test_copies_onto_the_same_place_keep_their_order() -> None:
    flat, into = torch.arange(1, 65, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)

    def load() -> None:
        into[4:12].view(torch.int32).copy_(flat[20:28].view(torch.int32))
        into[:8].view(torch.int32).copy_(flat[:8].view(torch.int32))

    record, want = recorded(flat, load), into.clone()
    into.zero_()
    for one in record.copied:
        one.into.copy_(one.source(flat))
    assert torch.equal(into, want) and want[4] == flat[4]


def test_the_experts_of_a_layer_are_three_copies() -> None:
    """Law: the number of copies does not depend on the number of experts."""
    num, inner, hidden = 8, 3, 4
    up, down = nn.Parameter(torch.zeros(num, 2 * inner, hidden)), nn.Parameter(torch.zeros(num, hidden, inner))
    specs = [Spec(f"{e}.{part}", (inner, hidden), torch.float32) for e in range(num) for part in ("gate", "up", "down")]
    flat = torch.randn(sum(spec.num_bytes for spec in specs) // 4).view(torch.uint8)

    def load() -> None:
        for name, tensor in Bucket.of(specs, flat).tensors:
            expert, part = name.split(".")
            if part == "down":
                down.data[int(expert)].copy_(tensor.view(hidden, inner))
            else:
                up.data[int(expert)].narrow(0, inner * (part == "up"), inner).copy_(tensor)

    record = recorded(flat, load)
    want = up.detach().clone(), down.detach().clone()
    assert len(record.copied) <= 3 and not record.others
    up.data.zero_()
    down.data.zero_()
    for one in record.copied:
        one.into.copy_(one.source(flat))
    assert torch.equal(up, want[0]) and torch.equal(down, want[1])
