"""Law: a sample's lists of numbers may be arrays, and nobody who reads it can tell."""

from __future__ import annotations

import copy
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.core.batch import TrainSample
from slime.core.columns import LEAST, Column, GrowingColumn
from slime.core.sample import NOT_SAMPLED, PER_TOKEN, Sample, Status

NUMBERS = st.one_of(
    st.lists(st.integers(-(2**70), 2**70)),
    st.lists(st.integers(0, 2**17), min_size=LEAST),
    st.lists(st.floats(width=32, allow_nan=False)),
    st.lists(st.floats()),
    st.lists(st.sampled_from([0, 1])),
    st.lists(st.booleans()),
    st.lists(st.one_of(st.integers(), st.floats(), st.none())),
    st.lists(st.tuples(st.integers(-1, 9), st.integers(1, 99))).map(
        lambda runs: [v for v, n in runs for _ in range(n)]
    ),
)


@given(NUMBERS)
def test_a_column_is_the_list_or_there_is_none(numbers: list[Any]) -> None:
    column = Column.of(numbers)
    if column is None:
        exact = [n for n in numbers if isinstance(n, float | int) and not (isinstance(n, float) and math.isnan(n))]
        truths = all(isinstance(n, bool) for n in numbers)
        assert len(exact) < len(numbers) or truths or any(abs(n) >= 2**53 for n in numbers)
        return
    assert column.tolist() == numbers and len(column) == len(column.array) == len(numbers)
    assert list(dict.fromkeys(column.distinct.tolist())) == list(dict.fromkeys(numbers))


@given(st.lists(st.one_of(st.lists(st.integers(-5, 2**31 - 1), max_size=50), st.integers(0, 60))))
def test_a_column_that_grows_reads_like_the_list_to_which_the_same_is_done(steps: list[Any]) -> None:
    column, numbers, forks = GrowingColumn("int32"), list[int](), list[tuple[GrowingColumn, list[int]]]()
    for step in steps:
        if isinstance(step, int):
            forks.append((column.upto(step), numbers[:step]))
            column.shorten_to(step)
            del numbers[step:]
        else:
            column.extend(step)
            numbers += step
    for one, same in ((column, numbers), *forks):
        assert one == same and list(one) == same and len(one) == len(same) and one.array.tolist() == same
        assert one[2:9] == same[2:9] and one[-3:] == same[-3:] and (not same or one[-1] == same[-1])
        assert one != [*same, 1] and all(type(number) is int for number in one)


@given(st.lists(st.integers(0, 300), min_size=LEAST))
def test_the_array_of_a_column_takes_the_mark_of_what_was_not_sampled(numbers: list[int]) -> None:
    """Law: -1 stays -1 beside any numbers. With unsigned ones, NumPy makes it 255, or raises, as its version has it."""
    column = Column.of(numbers)
    assert column is not None and column.array.tolist() == numbers
    assert np.where(np.ones(len(numbers), np.bool_), NOT_SAMPLED, column.array).tolist() == [-1] * len(numbers)


def test_numbers_take_the_room_that_they_need() -> None:
    sizes = {
        2: list(range(1000)),
        4: [i * 70_000 for i in range(1000)],
        0.024: [7] * 1000 + [-1] * 500 + [8] * 500,
    }
    for per_number, numbers in sizes.items():
        column = Column.of(numbers)
        assert column is not None and column.nbytes <= per_number * len(numbers)
    log_probs = Column.of([-i / 1024 for i in range(1000)])
    assert log_probs is not None and log_probs.values.dtype == "float32"


def sample(length: int) -> Sample:
    one = Sample(group_index=1, index=2, prompt="p", tokens=list(range(5)), metadata={"a": [1]})
    one.append_response_tokens(
        list(range(length)), log_probs=[-i / 8 for i in range(length)], weight_version=3, text="x" * length
    )
    one.append_response_tokens(list(range(length)))
    one.append_response_tokens([9], log_probs=[-0.1], weight_version=4, finish_reason="stop")
    one.teacher_log_probs = [0.1] * one.response_length
    one.add_turn_reward(0.1)
    return one


@pytest.mark.parametrize("length", [0, 100])
def test_a_packed_sample_reads_as_before(length: int) -> None:
    plain, packed = sample(length), sample(length)
    packed.pack()
    assert all(isinstance(packed.held(name), Column) is bool(length) for name in PER_TOKEN)
    assert packed.effective_response_length == plain.effective_response_length == length + 1
    assert packed.weight_versions == plain.weight_versions and packed.prompt_length == plain.prompt_length
    packed.validate()
    assert packed.to_dict() == plain.to_dict() and json.loads(packed.to_json()) == json.loads(plain.to_json())
    frozen = [TrainSample.from_sample(one, reward=1.0) for one in (plain, packed)]
    for name in ("tokens", "loss_mask", "rollout_log_probs", "token_versions", "teacher_log_probs", "token_rewards"):
        one, two = (getattr(each, name) for each in frozen)
        assert one.dtype == two.dtype and (one == two).all(), name
    copies = [packed.copy(), copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))]
    for other in (packed, *copies):
        assert all(isinstance(other.held(name), Column) is bool(length) for name in PER_TOKEN), "nobody read a list"
    assert all(other == plain for other in copies)
    assert Sample.from_dict(packed.to_dict()) == plain


def test_who_reads_a_packed_field_gets_a_list_of_his_own_that_stays() -> None:
    one = sample(100)
    one.teacher_log_probs = None
    one.pack()
    other = one.copy()
    tokens = one.tokens
    assert type(tokens) is list and tokens is one.tokens
    one.append_response_tokens([5], log_probs=[-1.0], weight_version=4)
    assert tokens[-1] == 5 and len(other.tokens) == len(tokens) - 1 and other.status is Status.COMPLETED
