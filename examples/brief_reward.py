"""A custom grader: one point for the correct number, minus up to a fifth of a point for a long response.

    python train.py ... --custom-rm-path examples.brief_reward:reward

The grader runs in a separate process, which is killed if it takes longer than `--reward-timeout-s`. After an exception,
a timeout or a non-finite reward, the sample has no reward, never a zero, and its group is retried.
"""

from __future__ import annotations

import re
from typing import Any

from slime.core.sample import Sample

LONG_CHARS = 2000
"""Length from which a response loses the whole fifth of a point."""


def reward(args: Any, sample: Sample) -> float:
    """Returns 0.8 to 1.0 for the correct number, and 0.0 for a wrong number or none."""
    numbers = re.findall(r"-?\d+", sample.response)
    if not numbers or numbers[-1] != str(sample.label).strip():
        return 0.0
    return 1.0 - 0.2 * min(len(sample.response) / LONG_CHARS, 1.0)
