"""A custom grader: one point for the right number, less up to a fifth for a long way to it.

    python train.py ... --custom-rm-path examples.brief_reward:reward

It runs in a process of its own that is killed when it takes longer than `--reward-timeout-s`. An exception, a timeout
or a reward that is not finite leaves the sample without one, and its group is tried again: nothing turns into zero.
"""

from __future__ import annotations

import re
from typing import Any

from slime.core.sample import Sample

LONG_CHARS = 2000
"""Answers of this length and more pay the whole price."""


def reward(args: Any, sample: Sample) -> float:
    """1.0 to 0.8 for the right number, 0.0 for another one or none."""
    numbers = re.findall(r"-?\d+", sample.response)
    if not numbers or numbers[-1] != str(sample.label).strip():
        return 0.0
    return 1.0 - 0.2 * min(len(sample.response) / LONG_CHARS, 1.0)
