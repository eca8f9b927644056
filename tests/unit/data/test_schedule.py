"""Laws of the schedule: a partition of the batch into whole steps, equal work per rank, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.core.errors import ConfigError, DataError
from slime.data.schedule import Schedule, build_schedule


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], dict[str, int | bool]]:
    num_steps, size = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    execution_S = [e for e in range(num_steps * size) for _ in range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        execution_S = draw(st.permutations(execution_S))
    num_tokens_S = draw(st.lists(st.integers(1, 50), min_size=len(execution_S), max_size=len(execution_S)))
    options: dict[str, int | bool] = {"dp_size": draw(st.integers(1, 5)), "global_batch_size": size}
    options[draw(st.sampled_from(["micro_batch_size", "max_tokens_per_gpu"]))] = draw(st.integers(1, 60))
    options["balance"] = draw(st.booleans())
    return num_tokens_S, list(execution_S), options


def flat(schedule: Schedule) -> list[int]:
    return [p for step in schedule.steps for rank in step.micro_batches for mb in rank for p in mb]


@given(batches())
def test_every_sample_is_trained_exactly_once(batch) -> None:
    num_tokens_S, execution_S, options = batch
    assert sorted(flat(build_schedule(num_tokens_S, execution_S, **options))) == list(range(len(num_tokens_S)))


@given(batches())
def test_a_step_holds_whole_executions(batch) -> None:
    num_tokens_S, execution_S, options = batch
    schedule = build_schedule(num_tokens_S, execution_S, **options)
    seen: set[int] = set()
    for step in schedule.steps:
        here = {execution_S[p] for p in step.positions}
        assert len(here) == step.num_executions == options["global_batch_size"]
        assert not here & seen
        seen |= here


@given(batches())
def test_ranks_have_equal_counts_within_limits(batch) -> None:
    num_tokens_S, execution_S, options = batch
    for step in build_schedule(num_tokens_S, execution_S, **options).steps:
        assert len(step.micro_batches) == options["dp_size"]
        assert {len(rank) for rank in step.micro_batches} == {step.num_micro_batches}
        assert step.num_micro_batches >= 1
        micro_batches = [mb for rank in step.micro_batches for mb in rank]
        if not all(micro_batches):
            assert all(len(mb) <= 1 for mb in micro_batches), "an empty slot while another could have been split"
        for mb in micro_batches:
            if "micro_batch_size" in options:
                assert len(mb) <= options["micro_batch_size"]
            elif len(mb) > 1:
                assert sum(num_tokens_S[p] for p in mb) <= options["max_tokens_per_gpu"]


@given(batches())
def test_it_is_deterministic_and_keeps_order_without_balance(batch) -> None:
    num_tokens_S, execution_S, options = batch
    options["balance"] = False
    schedule = build_schedule(num_tokens_S, execution_S, **options)
    assert schedule == build_schedule(num_tokens_S, execution_S, **options)
    for step in schedule.steps:
        for rank in step.micro_batches:
            for mb in rank:
                assert list(mb) == sorted(mb)


def test_balance_evens_out_the_ranks() -> None:
    lengths = [100, 90, 80, 10, 9, 8, 7, 6]
    plain = build_schedule(lengths, range(8), dp_size=2, global_batch_size=8)
    even = build_schedule(lengths, range(8), dp_size=2, global_batch_size=8, balance=True)

    def spread(schedule: Schedule) -> int:
        loads = [sum(lengths[p] for mb in rank for p in mb) for rank in schedule.steps[0].micro_batches]
        return max(loads) - min(loads)

    assert spread(even) <= 60 < 310 // 2
    assert spread(even) <= spread(plain)


@given(st.lists(st.integers(1, 1000), min_size=8, max_size=64), st.integers(2, 4))
def test_balance_is_within_the_longest_sample(lengths: list[int], dp_size: int) -> None:
    lengths = lengths[: len(lengths) // dp_size * dp_size]
    size = len(lengths)
    schedule = build_schedule(lengths, range(size), dp_size=dp_size, global_batch_size=size, balance=True)
    loads = [sum(lengths[p] for mb in rank for p in mb) for rank in schedule.steps[0].micro_batches]
    assert max(loads) - min(loads) <= max(lengths)


def test_an_oversized_sample_goes_alone() -> None:
    schedule = build_schedule([5, 99, 5, 5], range(4), dp_size=1, global_batch_size=4, max_tokens_per_gpu=10)
    assert schedule.steps[0].micro_batches == (((0, 2), (1,), (3,)),)


def test_a_small_batch_is_one_step_and_spare_ranks_get_nothing() -> None:
    schedule = build_schedule([3, 4], [7, 7], dp_size=4, global_batch_size=8)
    assert schedule.steps[0].micro_batches == (((0,),), ((1,),), ((),), ((),))
    assert schedule.steps[0].num_executions == 1


@pytest.mark.parametrize(
    ("lengths", "executions", "options", "error"),
    [
        ([1] * 10, range(10), {"global_batch_size": 4}, ConfigError),
        ([1], [0, 1], {}, DataError),
        ([], [], {}, DataError),
        ([0], [0], {}, DataError),
        ([1], [0], {"dp_size": 0}, ConfigError),
        ([1], [0], {"micro_batch_size": 1, "max_tokens_per_gpu": 5}, ConfigError),
        ([1], [0], {"max_tokens_per_gpu": 0}, ConfigError),
    ],
)
def test_what_cannot_be_scheduled_is_refused(lengths, executions, options, error) -> None:
    with pytest.raises(error):
        build_schedule(lengths, executions, **{"dp_size": 1, "global_batch_size": 1, **options})
