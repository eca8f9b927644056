"""Metrics with a defined reduction.

Each metric from a rank, micro-batch or sample defines how it is combined with others: means are weighted, counts are
summed, and worst cases use the maximum. So the reduction is the same everywhere, and never a mean of means.

Invariants
1. Reduction is associative: any grouping of the inputs yields the same metric, up to float rounding. Except for LAST,
   it is also commutative.
2. All metrics with the same name have the same kind. Mixing kinds is an error.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from slime.core.errors import DataError


class Reduce(str, Enum):
    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Metric:
    value: float
    how: Reduce = Reduce.MEAN
    weight: float = 1.0
    """Number of units (tokens, samples) that a mean covers. Ignored by the other kinds."""

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise DataError(f"the weight of a mean must be >= 0, got {self.weight}")

    def merge(self, other: Metric) -> Metric:
        """Combines this metric with a later one. Raises `DataError` if they reduce differently."""
        if self.how is not other.how:
            raise DataError(f"cannot combine a {self.how.value} with a {other.how.value}; use one kind for each name")
        if self.how is Reduce.MEAN:
            return self._merge_mean(other)
        if self.how is Reduce.LAST:
            return other
        if self.how is Reduce.SUM:
            return dataclasses.replace(self, value=self.value + other.value)
        if math.isnan(self.value) or math.isnan(other.value):
            return dataclasses.replace(self, value=math.nan)  # max() and min() can hide NaN
        pick = max if self.how is Reduce.MAX else min
        return dataclasses.replace(self, value=pick(self.value, other.value))

    def _merge_mean(self, other: Metric) -> Metric:
        weight = self.weight + other.weight
        # An empty mean may be NaN (0/0), which must not propagate.
        parts = [m.value * m.weight for m in (self, other) if m.weight > 0]
        value = sum(parts) / weight if weight > 0 else math.nan
        return Metric(value, Reduce.MEAN, weight)


MetricValue = Metric | float | int


def mean(value: float, weight: float = 1.0) -> Metric:
    """Returns a mean over `weight` units."""
    return Metric(float(value), Reduce.MEAN, float(weight))


def total(value: float) -> Metric:
    """Returns a count or amount that is summed."""
    return Metric(float(value), Reduce.SUM)


def maximum(value: float) -> Metric:
    return Metric(float(value), Reduce.MAX)


def minimum(value: float) -> Metric:
    return Metric(float(value), Reduce.MIN)


def last(value: float) -> Metric:
    """Returns a state, such as a learning rate or a version: the latest value is kept."""
    return Metric(float(value), Reduce.LAST)


def as_metric(value: MetricValue) -> Metric:
    """Converts a plain number to a mean with weight 1."""
    return value if isinstance(value, Metric) else mean(value)


def merge(*parts: Mapping[str, MetricValue]) -> dict[str, Metric]:
    """Combines the metrics of several ranks, micro-batches or samples by name. Raises `DataError` if a name has metrics
    of different kinds."""
    out: dict[str, Metric] = {}
    for part in parts:
        for name, value in part.items():
            metric = as_metric(value)
            try:
                out[name] = out[name].merge(metric) if name in out else metric
            except DataError as error:
                raise DataError(f"metric {name}: {error}") from None
    return out


def to_floats(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    """Returns plain numbers for a sink. Omits means with weight zero."""
    out = {}
    for name, value in metrics.items():
        metric = as_metric(value)
        if metric.how is not Reduce.MEAN or metric.weight > 0:
            out[name] = metric.value
    return out


def prefixed(prefix: str, metrics: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def describe(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns `name/mean`, `/median`, `/max` and `/min` of `values`. Empty if there are none."""
    if not values:
        return {}
    return {
        f"{name}/mean": math.fsum(values) / len(values),
        f"{name}/median": statistics.median(values),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
    }
