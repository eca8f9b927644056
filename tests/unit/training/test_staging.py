"""Micro-batches on their way to the device: the same bits as without staging, in order, one ahead, no thread left."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slime.algorithms import Algorithm
from slime.algorithms.whole_batch import BatchLogProbs
from slime.core.errors import DataError
from slime.training.step.micro_batch import MicroBatch, PreparedBatch, prepare, to_device, with_advantages
from slime.training.step.staging import ALIGNMENT, Put, Staging, layout
from tests.support.training import random_batch, training_args

CPU = torch.device("cpu")
KNOWN = ("old", "old_full", "ref")
DTYPES = st.sampled_from([np.int64, np.int32, np.float32, np.uint8, np.int16, np.float64])


def prepared_batch(path: Path, *, seed: int, known: frozenset[str], micro_batch_size: int) -> PreparedBatch:
    batch = random_batch(seed=seed)
    args = training_args(path, micro_batch_size=micro_batch_size, global_batch_size=8)
    algorithm = Algorithm.of(args)
    rng = np.random.default_rng(seed)
    made = {name: tuple(rng.normal(size=s.response_length).astype(np.float32) for s in batch.samples) for name in known}
    prepared = prepare(batch, args, algorithm, dp_size=1)
    return with_advantages(prepared, args, algorithm, BatchLogProbs(**made)) if known else prepared


def fields_of(value: Any, name: str = "") -> dict[str, Any]:
    """Every leaf of nested records."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [fields_of(getattr(value, f.name), f"{name}.{f.name}") for f in dataclasses.fields(value)]
        return {key: leaf for part in parts for key, leaf in part.items()}
    return {name: value}


def assert_same(got: MicroBatch, want: MicroBatch) -> None:
    ours, theirs = fields_of(got), fields_of(want)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, Tensor):
            assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
            assert np.array_equal(ours[name].numpy(), value.numpy(), equal_nan=True), name
        else:
            assert ours[name] == value, name


@given(
    seed=st.integers(0, 10_000),
    known=st.frozensets(st.sampled_from(KNOWN)),
    size=st.integers(1, 5),
    padding=st.sampled_from([(1, 1), (8, 1), (4, 4)]),
)
def test_every_field_is_the_same_with_and_without_staging(
    seed: int, known: frozenset[str], size: int, padding: tuple[int, int]
) -> None:
    """Law: staging moves bytes and changes none, for whatever is known of a batch; a dummy included."""
    prepared = prepared_batch(Path("model"), seed=seed, known=known, micro_batch_size=size)
    all_positions = [*prepared.schedule.steps[0].micro_batches[0], ()]
    pads = {"pad_to_multiple": padding[0], "pad_each_to": padding[1]}

    def build(positions: tuple[int, ...]) -> Callable[[Put], MicroBatch]:
        return lambda put: to_device(prepared, positions, CPU, **pads, put=put)

    staged = list(Staging(CPU).one_ahead([build(p) for p in all_positions]))
    for batch, positions in zip(staged, all_positions, strict=True):
        assert_same(batch, to_device(prepared, positions, CPU, **pads))


@given(
    shapes=st.lists(st.tuples(DTYPES, st.lists(st.integers(0, 40), max_size=2)), max_size=10), seed=st.integers(0, 99)
)
def test_arrays_lie_apart_and_aligned_and_come_out_as_they_went_in(
    shapes: list[tuple[Any, list[int]]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    arrays = {str(i): rng.integers(0, 100, shape).astype(dtype) for i, (dtype, shape) in enumerate(shapes)}
    starts, total = layout(arrays)
    taken = [False] * total
    for name, array in arrays.items():
        assert starts[name] % ALIGNMENT == 0
        own = slice(starts[name], starts[name] + array.nbytes)
        assert not any(taken[own]) and len(taken[own]) == array.nbytes
        taken[own] = [True] * array.nbytes
    (tensors,) = Staging(CPU).one_ahead([lambda put: put(arrays)])
    for name, array in arrays.items():
        assert tensors[name].numpy().dtype == array.dtype and np.array_equal(tensors[name].numpy(), array)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("micro-batches")]


def test_the_next_one_is_made_while_one_is_used_and_no_further() -> None:
    made = [threading.Event() for _ in range(4)]

    def build(index: int) -> Callable[[Put], int]:
        def made_now(put: Put) -> int:
            made[index].set()
            return index

        return made_now

    batches = Staging(CPU).one_ahead([build(i) for i in range(4)])
    for index in range(4):
        assert next(batches) == index
        if index + 1 < 4:
            assert made[index + 1].wait(60), "the next one is under way"
        assert not any(event.is_set() for event in made[index + 2 :]), "no further than one ahead"
    assert next(batches, None) is None and not threads()


def test_an_error_comes_where_its_micro_batch_was_asked_for_and_leaves_no_thread() -> None:
    def build(index: int) -> Callable[[Put], int]:
        def made(put: Put) -> int:
            if index == 1:
                raise DataError("sample 7 has no tokens")
            return index

        return made

    batches = Staging(CPU).one_ahead([build(i) for i in range(4)])
    assert next(batches) == 0
    with pytest.raises(DataError, match="sample 7 has no tokens"):
        next(batches)
    assert next(batches, None) is None and not threads()


def test_whoever_stops_early_leaves_no_thread_and_the_buffers_go_on_being_used() -> None:
    staging = Staging(CPU)
    builds = [lambda put, value=value: put({"x": np.array([value])})["x"] for value in range(5)]
    with closing(staging.one_ahead(builds)) as batches:
        assert int(next(batches)) == 0
        assert threads()
    assert not threads()
    assert [int(x) for x in staging.one_ahead(builds)] == list(range(5))
    assert list(staging.one_ahead([])) == [] and not threads()
