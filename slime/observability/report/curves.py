"""Curves: the values of one metric over the steps, and how a long one is drawn with few points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime.observability.report.record import Row, step_of

MAX_POINTS = 400
"""Most points of a drawn curve: more than a screen shows, and a page of any length stays small."""
SMOOTHED_FROM = 100
"""A curve of at least so many steps is drawn with its running mean."""
WINDOW_PART = 40
"""The running mean covers this part of the steps on either side."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Steps in increasing order and a finite value for each."""

    steps: Sequence[float]
    values: Sequence[float]

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def first(self) -> float:
        return self.values[0]

    @property
    def last(self) -> float:
        return self.values[-1]


def curve(rows: Sequence[Row], key: str) -> Curve:
    """The finite values of one metric by step; of a step that was logged twice the last."""
    points: dict[int, float] = {}
    for row in rows:
        if key in row and math.isfinite(row[key]) and (step := step_of(row)) is not None:
            points[step] = row[key]
    ordered = sorted(points.items())
    return Curve([float(step) for step, _ in ordered], [value for _, value in ordered])


def thinned(whole: Curve, max_points: int = MAX_POINTS) -> Curve:
    """At most about `max_points` of the points: first, last, and the least and the greatest of each stretch between,
    so that no peak is lost.
    """
    count = len(whole.steps)
    if count <= max_points:
        return whole
    stretches = max(1, max_points // 2 - 1)
    kept = {0, count - 1}
    for number in range(stretches):
        begin, end = number * count // stretches, (number + 1) * count // stretches
        places = range(begin, end)
        kept |= {min(places, key=whole.values.__getitem__), max(places, key=whole.values.__getitem__)}
    order = sorted(kept)
    return Curve([whole.steps[i] for i in order], [whole.values[i] for i in order])


def running_mean(whole: Curve) -> Curve | None:
    """The mean around each step, of a curve long enough to need one; None for a short one."""
    count = len(whole.steps)
    if count < SMOOTHED_FROM:
        return None
    reach = max(1, count // WINDOW_PART)
    sums = [0.0]
    for value in whole.values:
        sums.append(sums[-1] + value)
    means = []
    for i in range(count):
        begin, end = max(0, i - reach), min(count, i + reach + 1)
        means.append((sums[end] - sums[begin]) / (end - begin))
    return thinned(Curve(whole.steps, means), MAX_POINTS // 2)
