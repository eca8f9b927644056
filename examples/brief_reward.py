"""A custom grader: one point for the right number, minus up to a fifth for a long answer.

    python train.py ... --custom-rm-path examples.brief_reward:reward

It runs in a separate process, which is killed if it takes longer than `--reward-timeout-s`. After an exception, a
timeout or a non-finite reward the sample has no reward, and its group is tried again; it never gets a zero.
"""

from __future__ import annotations

import re
from typing import Any

from slime.core.sample import Sample

LONG_CHARS = 2000
"""Answers of this length or more lose the whole fifth."""


def reward(args: Any, sample: Sample) -> float:
    """1.0 to 0.8 for the right number, 0.0 for another or none."""
    numbers = re.findall(r"-?\d+", sample.response)
    if not numbers or numbers[-1] != str(sample.label).strip():
        return 0.0
    return 1.0 - 0.2 * min(len(sample.response) / LONG_CHARS, 1.0)
