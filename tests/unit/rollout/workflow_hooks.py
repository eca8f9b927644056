"""User functions of the tests of workflows."""

from __future__ import annotations

from typing import Any

from slime.core.sample import Sample


def one(args: Any, sample: Sample) -> float:
    """Everything is right."""
    return 1.0


def odd_is_right(args: Any, sample: Sample) -> float:
    """A reward that differs between the samples of a group: 1.0 for every other execution."""
    return float((sample.index or 0) % 2)
