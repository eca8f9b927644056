"""Grading results: a score, or the reason why there is none; and what length adds to scores before training.

Invariants
1. A failure that is not the answer's fault never becomes a number. It becomes `Unscored`, and the rollout decides
   whether to retry.
2. An answer cannot profit from crashing its grader. If a compute-only grader cannot handle an answer, the answer is
   scored as wrong, and `Scored.ungradable` has the reason.
3. Length changes only the rewards that are trained. Filters, evaluations and metrics see the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.core.blame import RAISED_AT

MAX_RESULT_BYTES = 64 * 1024
"""Maximum size of a reward as JSON. A larger one is malicious or a mistake."""


@dataclass(frozen=True, slots=True)
class Scored:
    value: float | dict[str, Any]
    """A finite number, or a dict of numbers from which `--reward-key` picks one."""
    ungradable: str = ""
    """Why the grader could not handle the answer, so that it was scored as wrong. Empty otherwise."""
    metadata: dict[str, Any] | None = None
    """The sample's metadata as a user's function left it. None: unchanged."""


@dataclass(frozen=True, slots=True)
class Unscored:
    """The sample has no reward."""

    reason: str
    """A single line for the sample's metadata, the log and the metrics."""
    metadata: dict[str, Any] | None = None
    """As in `Scored`."""


Score = Scored | Unscored


def check_reward(value: Any) -> Score:
    """Validates a grader's return value. Anything but a finite number or a dict of finite numbers is `Unscored`."""
    if isinstance(value, bool):
        return Scored(float(value))
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            return Unscored("the grader returned an integer too large for a float")
        return Scored(number) if math.isfinite(number) else Unscored(f"the grader returned {number}")
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                return Unscored(f"the grader returned a dict with the key {key!r:.80}; keys must be strings")
            if isinstance(entry, float) and not math.isfinite(entry):
                return Unscored(f"the grader returned {entry} under {key!r:.80}")
        return Scored(value) if value else Unscored("the grader returned an empty dict")
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        return check_reward(value.item())  # a NumPy scalar, without importing NumPy
    return Unscored(f"the grader returned {type(value).__name__}, expected a number or a dict of numbers")


def reason_kind(reason: str) -> str:
    """Converts a reason to a metric name: its first four words in lower case, joined by `_`."""
    reason = reason.partition(RAISED_AT)[0].lower()
    words = "".join(c if c.isalpha() else " " for c in reason).split()
    return "_".join(words[:4]) or "unknown"


def overlong_penalty(length: int, max_length: int, buffer_length: int) -> float:
    """Returns DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, equation 13), from -1 to 0.

    0 up to max_length - buffer_length tokens, then falling linearly to -1 at max_length, and -1 beyond. Needs
    0 < buffer_length <= max_length.
    """
    excess = length - (max_length - buffer_length)
    return -min(1.0, max(0, excess) / buffer_length)


def length_rewards(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """Returns the length reward of each response to one prompt (Kimi k1.5, arXiv:2501.12599, section 2.3.3).

    With x = 0.5 - (length - shortest) / (longest - shortest), from -0.5 to 0.5: x for a correct response, min(0, x) for
    a wrong one. 0 if all have the same length.
    """
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    shares = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [x if right else min(0.0, x) for x, right in zip(shares, correct, strict=True)]
