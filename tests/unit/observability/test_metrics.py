"""Reducing metrics does not depend on how the parts were grouped."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.core.errors import DataError
from slime.observability.tracker import (
    Metric,
    Reduce,
    describe,
    last,
    maximum,
    mean,
    merge,
    minimum,
    to_floats,
    total,
)

VALUES = st.floats(-1e3, 1e3)
PARTS = st.lists(st.tuples(VALUES, st.floats(0, 100)), min_size=1, max_size=12)


@given(PARTS, st.integers(0, 12), st.sampled_from(list(Reduce)))
def test_any_cut_gives_the_same(parts: list[tuple[float, float]], cut: int, how: Reduce) -> None:
    metrics = [{"x": Metric(v, how, w)} for v, w in parts]
    whole = merge(*metrics)
    cut_up = merge(merge(*metrics[:cut]), merge(*metrics[cut:]))
    assert to_floats(cut_up).keys() == to_floats(whole).keys()
    for name, value in to_floats(whole).items():
        assert to_floats(cut_up)[name] == pytest.approx(value, rel=1e-9, abs=1e-6)


@given(PARTS)
def test_mean_is_over_units_not_over_parts(parts: list[tuple[float, float]]) -> None:
    weight = math.fsum(w for _, w in parts)
    merged = merge(*({"x": mean(v, w)} for v, w in parts))
    if weight > 1e-6:
        assert merged["x"].value == pytest.approx(math.fsum(v * w for v, w in parts) / weight, abs=1e-6)


def test_each_kind() -> None:
    pairs = {"sum": (total, 5.0), "max": (maximum, 3.0), "min": (minimum, 2.0), "last": (last, 2.0)}
    for name, (make, expected) in pairs.items():
        assert to_floats(merge({name: make(3)}, {name: make(2)})) == {name: expected}


def test_an_empty_mean_is_not_a_number_and_spoils_none() -> None:
    empty = mean(math.nan, 0.0)
    assert to_floats({"x": empty}) == {}
    assert to_floats(merge({"x": empty}, {"x": mean(4.0)})) == {"x": 4.0}


@pytest.mark.parametrize("make", [maximum, minimum, total, mean])
@pytest.mark.parametrize("order", [1, -1])
def test_nan_is_never_hidden(make: type[Metric], order: int) -> None:
    parts = [{"x": make(math.nan)}, {"x": make(1.0)}][::order]
    assert math.isnan(merge(*parts)["x"].value)


def test_mixed_kinds_are_refused_by_name() -> None:
    with pytest.raises(DataError, match="metric loss"):
        merge({"loss": mean(1.0)}, {"loss": total(1.0)})


def test_describe() -> None:
    assert describe("len", [1, 2, 6]) == {"len/mean": 3, "len/median": 2, "len/max": 6, "len/min": 1}
    assert describe("len", []) == {}
