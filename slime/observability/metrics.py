"""Metrics with a defined reduction.

A metric from one rank, micro-batch or sample defines how it combines with others: a mean has a weight, counts are
summed, and worst cases are reduced by the maximum. So the reduction is the same everywhere, and never a mean of means.

Invariants
1. Reducing is associative: any grouping of the inputs results in the same metric, up to float rounding. For all kinds
   except LAST, the order does not matter either.
2. All metrics of one name have one kind; mixing kinds is an error.
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
    """Number of units (tokens, samples) of a mean; unused by the other kinds."""

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise DataError(f"the weight of a mean is {self.weight}; it must be >= 0")

    def merge(self, other: Metric) -> Metric:
        """Combines this metric with a later one. Raises `DataError` if they reduce differently."""
        if self.how is not other.how:
            raise DataError(f"one metric is a {self.how.value} and a {other.how.value}; use one kind for each name")
        if self.how is Reduce.MEAN:
            return self._merge_mean(other)
        if self.how is Reduce.LAST:
            return other
        if self.how is Reduce.SUM:
            return dataclasses.replace(self, value=self.value + other.value)
        if math.isnan(self.value) or math.isnan(other.value):
            return dataclasses.replace(self, value=math.nan)  # max() and min() may hide it
        pick = max if self.how is Reduce.MAX else min
        return dataclasses.replace(self, value=pick(self.value, other.value))

    def _merge_mean(self, other: Metric) -> Metric:
        weight = self.weight + other.weight
        # An empty mean may be NaN (0/0), which must not spoil the result.
        parts = [m.value * m.weight for m in (self, other) if m.weight > 0]
        value = sum(parts) / weight if weight > 0 else math.nan
        return Metric(value, Reduce.MEAN, weight)


MetricValue = Metric | float | int


def mean(value: float, weight: float = 1.0) -> Metric:
    """Returns a mean over `weight` units."""
    return Metric(float(value), Reduce.MEAN, float(weight))


def total(value: float) -> Metric:
    """Returns a count or an amount, which is summed."""
    return Metric(float(value), Reduce.SUM)


def maximum(value: float) -> Metric:
    return Metric(float(value), Reduce.MAX)


def minimum(value: float) -> Metric:
    return Metric(float(value), Reduce.MIN)


def last(value: float) -> Metric:
    """Returns a state (a learning rate, a version); its latest value counts."""
    return Metric(float(value), Reduce.LAST)


def as_metric(value: MetricValue) -> Metric:
    """Converts a bare number to a mean of weight 1."""
    return value if isinstance(value, Metric) else mean(value)


def merge(*parts: Mapping[str, MetricValue]) -> dict[str, Metric]:
    """Combines the metrics of several ranks, micro-batches or samples by name. Raises `DataError` with the name of a
    metric that cannot be combined."""
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
    """Returns plain numbers for a sink, without means of weight zero."""
    out = {}
    for name, value in metrics.items():
        metric = as_metric(value)
        if metric.how is not Reduce.MEAN or metric.weight > 0:
            out[name] = metric.value
    return out


def prefixed(prefix: str, metrics: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def describe(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns `name/mean`, `/median`, `/max` and `/min` of `values`; empty without values."""
    if not values:
        return {}
    return {
        f"{name}/mean": math.fsum(values) / len(values),
        f"{name}/median": statistics.median(values),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
    }
