"""Laws of the schedule: a partition of the batch into whole steps, equal work per rank, nothing lost."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.core.errors import ConfigError, DataError
from slime.data.micro_batch_schedule import Schedule, StepSchedule, build_schedule
from slime.models.common.flops import decoder_flops, grouped_query_cost


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], dict[str, Any]]:
    num_steps, size = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    execution_S = [e for e in range(num_steps * size) for _ in range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        execution_S = draw(st.permutations(execution_S))
    num_tokens_S = draw(st.lists(st.integers(1, 50), min_size=len(execution_S), max_size=len(execution_S)))
    options: dict[str, Any] = {"dp_size": draw(st.integers(1, 5)), "micro_batch_multiple": draw(st.integers(1, 3))}
    options.update(draw(st.sampled_from([{"global_batch_size": size}, {"num_steps": draw(st.integers(1, 6))}])))
    if draw(st.booleans()):
        count = len(execution_S)
        options["cost_S"] = draw(st.lists(st.floats(1e-3, 1e15), min_size=count, max_size=count))
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
        assert len(here) == step.num_executions
        assert not here & seen
        seen |= here
    counts = [step.num_executions for step in schedule.steps]
    if "global_batch_size" in options:
        assert set(counts) == {options["global_batch_size"]}
    else:
        assert len(counts) == min(options["num_steps"], len(seen))
        assert max(counts) - min(counts) <= 1


@given(batches())
def test_ranks_have_equal_counts_within_limits(batch) -> None:
    num_tokens_S, execution_S, options = batch
    for step in build_schedule(num_tokens_S, execution_S, **options).steps:
        assert len(step.micro_batches) == options["dp_size"]
        assert {len(rank) for rank in step.micro_batches} == {step.num_micro_batches}
        assert step.num_micro_batches >= 1
        assert step.num_micro_batches % options["micro_batch_multiple"] == 0
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


@given(batches())
def test_what_runs_side_by_side_is_neighbouring_in_cost(batch) -> None:
    num_tokens_S, execution_S, options = batch
    costs = options.get("cost_S", num_tokens_S)
    for step in build_schedule(num_tokens_S, execution_S, **{**options, "balance": True}).steps:
        by_slot = [[cost_of(rank[i], costs) for rank in step.micro_batches] for i in range(step.num_micro_batches)]
        for earlier, later in itertools.pairwise(by_slot):
            assert min(earlier) >= max(later)


@given(batches())
def test_balance_takes_no_more_micro_batches_and_no_dearer_one(batch) -> None:
    num_tokens_S, execution_S, options = batch
    costs = options.get("cost_S", num_tokens_S)
    plain, even = (build_schedule(num_tokens_S, execution_S, **{**options, "balance": b}) for b in (False, True))
    for one, two in zip(plain.steps, even.steps, strict=True):
        assert one.num_micro_batches == two.num_micro_batches
        dearest = [max(cost_of(mb, costs) for rank in step.micro_batches for mb in rank) for step in (one, two)]
        assert dearest[1] <= dearest[0]


def cost_of(positions: tuple[int, ...], costs: list[float]) -> float:
    return math.fsum(costs[p] for p in positions)


def imbalance(step: StepSchedule, costs: list[float]) -> tuple[float, float]:
    """(dearest rank over mean rank, time of slots that wait for their slowest rank over the mean rank's)."""
    table = np.array([[cost_of(mb, costs) for mb in rank] for rank in step.micro_batches])
    mean = table.sum() / len(table)
    return float(table.sum(axis=1).max() / mean), float(table.max(axis=0).sum() / mean)


@pytest.mark.parametrize("seed", range(3))
def test_balance_by_cost_beats_balance_by_tokens_on_heavy_tails(seed: int) -> None:
    """1,024 samples of log-normal lengths up to 16k of a 24-layer model: attention makes the long ones dear."""
    shape = {"num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "vocab_size": 151936}
    flops = decoder_flops({**shape, "num_attention_heads": 14, "num_key_value_heads": 2}, grouped_query_cost)
    lengths = np.random.default_rng(seed).lognormal(7.0, 1.0, 1024).clip(64, 16384).astype(int).tolist()
    costs = [flops.forward(n) for n in lengths]
    common: dict[str, Any] = {"dp_size": 8, "num_steps": 1, "max_tokens_per_gpu": 20000}
    plain = build_schedule(lengths, range(1024), **common)
    by_tokens = build_schedule(lengths, range(1024), **common, balance=True)
    by_cost = build_schedule(lengths, range(1024), **common, balance=True, cost_S=costs)
    ranks, slots = zip(*(imbalance(s.steps[0], costs) for s in (plain, by_tokens, by_cost)), strict=True)
    assert ranks[2] < min(ranks[0], ranks[1]), f"dearest rank over mean: {ranks}"
    assert slots[2] < min(slots[0], slots[1]), f"waiting for the slowest of each slot: {slots}"
    assert ranks[2] < 1.02 and slots[2] < 1.02 < 1.1 < slots[1], f"{ranks} {slots}"


def test_any_number_of_executions_is_trained_in_even_steps() -> None:
    schedule = build_schedule([4] * 11, range(11), dp_size=2, num_steps=3, micro_batch_size=2)
    assert [step.num_executions for step in schedule.steps] == [3, 4, 4]
    assert sorted(flat(schedule)) == list(range(11))


def test_groups_of_equal_size_stay_whole_where_they_divide() -> None:
    group_S = [g for g in range(6) for _ in range(4)]
    for step in build_schedule([1] * 24, range(24), dp_size=1, num_steps=3).steps:
        assert len({group_S[p] for p in step.positions}) == 2


def test_the_cap_holds_where_cost_would_rather_exceed_it() -> None:
    """Two dear short samples and four cheap long ones: by cost alone one bin would hold all long ones."""
    lengths, costs = [1, 1, 5, 5, 5, 5], [100.0, 100.0, 1.0, 1.0, 1.0, 1.0]
    schedule = build_schedule(
        lengths, range(6), dp_size=3, num_steps=1, max_tokens_per_gpu=11, balance=True, cost_S=costs
    )
    for rank in schedule.steps[0].micro_batches:
        assert all(sum(lengths[p] for p in mb) <= 11 for mb in rank)


def test_an_interleaved_pipeline_gets_whole_rounds() -> None:
    step = build_schedule([3] * 6, range(6), dp_size=1, num_steps=1, micro_batch_size=2, micro_batch_multiple=4).steps[
        0
    ]
    assert step.num_micro_batches == 4
    assert all(step.micro_batches[0])


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
        ([1], [0], {"num_steps": 1}, ConfigError),
        ([1], [0], {"global_batch_size": None}, ConfigError),
        ([1], [0], {"global_batch_size": None, "num_steps": 0}, ConfigError),
        ([1], [0], {"micro_batch_multiple": 0}, ConfigError),
        ([1], [0], {"cost_S": [1.0, 2.0]}, DataError),
        ([1], [0], {"cost_S": [float("nan")]}, DataError),
    ],
)
def test_what_cannot_be_scheduled_is_refused(lengths, executions, options, error) -> None:
    with pytest.raises(error):
        build_schedule(lengths, executions, **{"dp_size": 1, "global_batch_size": 1, **options})
