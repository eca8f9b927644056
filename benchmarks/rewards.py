"""Rewards for benchmarks of random models: cheap, and different within a group, so there is a gradient."""

from __future__ import annotations

from typing import Any

from slime.core.sample import Sample


def parity(args: Any, sample: Sample, **_: Any) -> float:
    """Returns 1.0 if the sum of the response's ids is even, else 0.0."""
    return float(sum(sample.tokens[-sample.response_length :]) % 2 == 0)


def evens(args: Any, sample: Sample, **_: Any) -> float:
    """Returns the share of the response's ids that are even. A model with random weights can learn it."""
    ids = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in ids) / len(ids)
