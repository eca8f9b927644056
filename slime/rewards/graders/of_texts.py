"""The built-in graders of mathematics for reward functions that hold texts: an answer, and the reference."""

from __future__ import annotations

from typing import Any

from slime.core.sample import Sample
from slime.rewards.graders import BUILT_IN_LIMIT_S
from slime.rewards.graders.answers import last_boxed
from slime.rewards.graders.dapo import Dapo
from slime.rewards.graders.deepscaler import DeepScaler
from slime.rewards.graders.math_answer import equal_answers


def deepscaler_reward(response: str, label: object) -> float:
    """1.0 or 0.0, as `--rm-type deepscaler`. Raises `DataError` for a label without an expression."""
    return DeepScaler().grade(Sample(response=response, label=label), BUILT_IN_LIMIT_S)


def dapo_score(solution: str, label: object) -> dict[str, Any]:
    """`score`, `acc` and `pred`, as `--rm-type dapo`. Raises as above."""
    return Dapo().grade(Sample(response=solution, label=label), BUILT_IN_LIMIT_S)


def boxed_equals(solution: str, label: object) -> bool:
    """Whether the last box of a solution holds the reference's value. Raises as above."""
    answer, reference = last_boxed(solution), str(label)
    return answer is not None and equal_answers(answer, last_boxed(reference) or reference, boxed=True)
