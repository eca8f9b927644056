"""Memory that goes to and fro: ranges of the host arena, what is put away comes back, phases and their peaks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from slime.core.errors import ConfigError, DeadlineExceeded
from slime.core.hf_config import read_hf_config
from slime.models import table_for
from slime.training.state.sleeping import (
    ALIGNMENT,
    EngineBytes,
    Held,
    HostArena,
    HostStash,
    MemoryPlan,
    Parts,
    RankBytes,
    Sleeper,
    Undo,
    engine_bytes,
    pin_for,
    predicted_peaks,
    room_of,
)
from tests.support.quantised import write_quantised
from tests.support.tiny import write_tiny_model

CPU = torch.device("cpu")
"""Stands for the GPU: storages are emptied and filled there just the same."""
SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=12)


def arena_of(num_bytes: int) -> HostArena:
    return HostArena(num_bytes, pin_for(CPU))


@given(sizes=SIZES, planned=st.integers(0, 20000), rounds=st.integers(1, 2))
def test_ranges_are_aligned_and_do_not_overlap_also_where_the_plan_was_too_small(
    sizes: list[int], planned: int, rounds: int
) -> None:
    arena = arena_of(planned)
    begin = arena.mark()
    for _ in range(rounds):
        arena.rewind(begin)
        taken = [arena.take(size) for size in sizes]
        assert [t.numel() for t in taken] == sizes
        assert all(t.data_ptr() % ALIGNMENT == 0 for t in taken if t.numel())
        for value, part in enumerate(taken):
            part.fill_(value)
        assert all(bool((part == value).all()) for value, part in enumerate(taken)), "one was written over"
    arena.close()


def test_a_plan_that_fits_takes_no_more_and_is_reused() -> None:
    arena = arena_of(sum(map(room_of, (700, 1, 512))))
    begin = arena.mark()
    first = [arena.take(n).data_ptr() for n in (700, 1, 512)]
    size = arena.num_bytes
    arena.rewind(begin)
    assert [arena.take(n).data_ptr() for n in (700, 1, 512)] == first and arena.num_bytes == size
    arena.close()


def test_making_the_arena_waits_for_nobody_and_taking_from_it_waits_with_a_limit() -> None:
    go_on, undone = threading.Event(), threading.Event()

    def slow(memory: Tensor) -> tuple[Tensor, Undo]:
        assert go_on.wait(60)
        return memory, undone.set

    arena = HostArena(1000, slow, limit_s=0.05)
    with pytest.raises(DeadlineExceeded, match=r"training rank waited .* host memory to be pinned"):
        arena.take(10)
    go_on.set()
    while True:
        try:
            assert arena.take(10).numel() == 10
            break
        except DeadlineExceeded:
            time.sleep(0.05)
    assert not undone.is_set()
    arena.close()
    assert undone.is_set()


def test_a_host_that_refuses_is_heard_by_the_one_who_needs_the_memory() -> None:
    def refuse(memory: Tensor) -> tuple[Tensor, Undo]:
        raise ConfigError("got error 2, because; do")

    arena = HostArena(1000, refuse)
    with pytest.raises(ConfigError, match="got error 2"):
        arena.take(10)


@given(sizes=st.lists(st.integers(1, 300), min_size=2, max_size=8), seed=st.integers(0, 1000), data=st.data())
def test_what_is_put_away_comes_back_bit_for_bit_and_dropped_ones_as_zeros(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randint(0, 255, (4 * n,), dtype=torch.uint8, generator=generator).view(torch.float32) for n in sizes]
    views = [t[len(t) // 2 :] for t in whole]
    before = [t.clone() for t in whole]
    parts = data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    stash = HostStash(arena_of(0), CPU)
    for _ in range(2):
        freed = stash.put_away([t for t, p in zip(whole, parts, strict=True) if p == 0])
        rest = [t for t, p in zip(whole, parts, strict=True) if p == 1]
        freed += stash.put_away([*rest, *rest], [t for t, p in zip(whole, parts, strict=True) if p == 2])
        assert freed == 4 * sum(sizes) and all(t.untyped_storage().nbytes() == 0 for t in whole)
        stash.take_back()
        assert stash.empty
        for tensor, view, want, part in zip(whole, views, before, parts, strict=True):
            want = torch.zeros_like(want) if part == 2 else want
            assert torch.equal(tensor.view(torch.int32), want.view(torch.int32))
            assert torch.equal(view.view(torch.int32), want[len(want) // 2 :].view(torch.int32)), (
                "a view lost its storage"
            )


class Rank:
    """A rank's tensors: weights, an optimizer that makes moments when it first steps, gradients."""

    def __init__(self, *, float32: bool) -> None:
        self.weights = [torch.arange(10.0), torch.arange(20.0)]
        self.masters = [w[:5] for w in self.weights] if float32 else [w * 2 for w in self.weights]
        self.moments: list[Tensor] = []
        self.gradients = [torch.ones(30)]

    def step(self) -> None:
        self.moments = [torch.full_like(m, 3.0) for m in self.masters for _ in range(2)]

    def parts(self) -> Parts:
        later = 0 if self.moments else sum(2 * 4 * m.numel() for m in self.masters)
        return Parts(self.weights, [*self.masters, *self.moments], self.gradients, later, 0 if self.moments else 6)

    def there(self) -> tuple[bool, bool, bool]:
        """Whether weights, what the optimizer has of its own, and gradients are on the device."""
        own = self.parts().apart()
        return tuple(
            all(t.untyped_storage().nbytes() > 0 for t in part) for part in (self.weights, own, self.gradients)
        )  # type: ignore[return-value]


@pytest.mark.parametrize("float32", [False, True])
def test_a_rank_gives_what_engines_are_not_sent_first_and_all_of_it_later(float32: bool) -> None:
    rank = Rank(float32=float32)
    sleeper = Sleeper(rank.parts, CPU, active=True, prepares=True)
    planned = rank.parts().arena_bytes(CPU)
    for round_ in range(3):
        before = [t.clone() for t in (*rank.weights, *rank.masters, *rank.moments)]
        assert sleeper.held is Held.ALL and all(rank.there())
        sleeper.keep_weights()
        own = bool(rank.parts().apart())
        assert sleeper.held is Held.WEIGHTS and rank.there() == (True, not own, False)
        assert all(torch.equal(a, b) for a, b in zip(rank.weights, before, strict=False)), "weights can be sent"
        if round_ != 1:  # from there it may be woken, too
            sleeper.sleep()
            assert sleeper.held is Held.NOTHING and not any(rank.there()[i] for i in (0, 2))
        if round_ == 2:  # weights may come back alone, to be sent, and be put away again
            sleeper.keep_weights()
            assert sleeper.held is Held.WEIGHTS and rank.there() == (True, not own, False)
            assert all(torch.equal(a, b) for a, b in zip(rank.weights, before, strict=False))
            sleeper.sleep()
        sleeper.wake()
        after = (*rank.weights, *rank.masters, *rank.moments)
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        assert not rank.gradients[0].any(), "gradients are zeros"
        rank.gradients[0].fill_(1.0)
        if round_ == 0:
            rank.step()
    arena: Any = sleeper._arena
    assert arena.num_bytes == planned, "moments that come later were planned for"
    sleeper.close()


def test_sleeping_twice_and_waking_twice_are_once_and_on_a_cpu_nothing_moves() -> None:
    rank = Rank(float32=False)
    sleeper = Sleeper(rank.parts, CPU, active=True, prepares=False)
    sleeper.sleep()
    sleeper.sleep()
    assert sleeper.held is Held.NOTHING
    sleeper.wake()
    sleeper.wake()
    assert torch.equal(rank.weights[1], torch.arange(20.0))
    sleeper.close()
    still = Sleeper(rank.parts, CPU, active=False, prepares=True)
    assert still.sleep() == {} and still.held is Held.ALL and all(rank.there())


def test_the_peaks_are_sums_of_what_has_to_be_there_at_once() -> None:
    rank, engine = RankBytes(weights=8, gradients=16, others=48), EngineBytes(weights=8, pool=60)
    peaks = predicted_peaks(rank, engine, bucket_bytes=2)
    assert {phase: (p.trainer, p.engine) for phase, p in peaks.items()} == {
        "train": (72, 0),
        "sync": (12, 8),
        "generate": (0, 60),
    }
    assert predicted_peaks(rank, engine, bucket_bytes=100)["sync"].trainer == 24, "a bucket is no larger than the model"
    assert MemoryPlan(71, peaks).too_large() == ["train"] and MemoryPlan(72, peaks).too_large() == []
    unknown = MemoryPlan(80, predicted_peaks(rank, EngineBytes(8, None), bucket_bytes=2))
    assert "generate: engine as SGLang chooses" in str(unknown) and unknown.facts()["generate"]["engine"] is None


def test_contexts_and_communicators_take_room_in_every_phase() -> None:
    peaks = predicted_peaks(RankBytes(weights=8, gradients=16, others=0), EngineBytes(8, 60), bucket_bytes=2)
    plan = MemoryPlan(70, peaks).with_measured(training_bytes=66, outside_bytes=4)
    assert plan.too_large() == [] and plan.facts()["outside_bytes"] == 4
    assert plan.with_measured(67, 4).too_large() == ["train"]
    assert plan.with_measured(60, 11).too_large() == ["train", "generate"]


@pytest.mark.parametrize("kind", ["plain", "fp8", "channels", "int4"])
def test_an_engine_has_as_many_bytes_of_weights_as_the_tensors_of_its_folder(tmp_path: Path, kind: str) -> None:
    """Law: also of one that serves codes and scales; the shapes beside codes of INT4 are nothing that it keeps."""
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
    plain = write_tiny_model(tmp_path / "plain", "qwen3", tied=False, **shape)
    folder, quantised = (plain, None) if kind == "plain" else write_quantised(plain, tmp_path / kind, kind)
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    sizes = [t.nbytes for file in files for name, t in file.items() if not name.endswith("weight_shape")]
    table, itemsize = table_for(read_hf_config(str(plain))), 4 if kind == "plain" else 2
    found = engine_bytes(table, itemsize=itemsize, tp_size=1, gpu_bytes=1000, fraction=0.5, quantised=quantised)
    assert found == EngineBytes(sum(sizes), 500)


def test_before_the_first_step_the_moments_are_counted_already() -> None:
    rank = Rank(float32=False)
    before = rank.parts().num_bytes(CPU)
    rank.step()
    assert rank.parts().num_bytes(CPU) == before
    assert before == RankBytes(weights=120, gradients=120, others=3 * 120)
