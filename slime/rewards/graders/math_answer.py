"""Mathematics: 1.0 if math-verify finds the final answer equal to the label, else 0.0.

The answer is the last `\\boxed{}`, else whatever math-verify extracts from the whole response. math-verify's own
time limit is off: it rests on SIGALRM, which a long big-integer power ignores; the pool kills the worker instead.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader
from slime.rewards.graders.answers import last_boxed

MAX_ANSWER_CHARS = 2_000
"""A longer "final answer" is a text, not an answer: it scores 0.0 without parsing."""
TAIL_CHARS = 4_000
"""Without a box only the end of the response is searched."""


@functools.lru_cache(maxsize=256)
def reference(label: str) -> list[Any]:
    """What the label means to math-verify. Raises `DataError` if it finds no expression.

    It is compared with a number once, so that a label that takes long to compute is found out before any answer is.
    """
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold: list[Any] = math_verify.parse(label if "\\boxed" in label else f"\\boxed{{{label}}}", parsing_timeout=None)
    if not gold:
        raise DataError(f"got the label {label!r:.100}, in which math-verify finds no expression; check --label-key")
    math_verify.verify(gold, math_verify.parse("\\boxed{0.1234567}", parsing_timeout=None), timeout_seconds=None)
    return gold


def label_of(sample: Sample, grader: str) -> str:
    """The label as text. Raises `DataError` if it is missing or `reference` cannot read it."""
    if sample.label is None:
        raise DataError(f"the {grader} grader needs a label; set --label-key")
    reference(str(sample.label))
    return str(sample.label)


def equal_answers(answer: str, label: str, *, boxed: bool) -> bool:
    """Whether `answer` equals the label. Raises `DataError` if the label itself cannot be parsed."""
    if answer.strip() == label.strip():
        return True
    import math_verify

    gold = reference(label)
    predicted = math_verify.parse(f"\\boxed{{{answer}}}" if boxed else answer, parsing_timeout=None)
    return bool(math_verify.verify(gold, predicted, timeout_seconds=None))


@GRADERS.register("math")
class MathAnswer(Grader):
    """The final answer equals the label, by math-verify."""

    needs_label = True
    held = True
    wrong = 0.0

    def prepare(self, sample: Sample) -> None:
        """Raises `DataError` on a missing or unreadable label."""
        label_of(sample, self.name)

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns 1.0 or 0.0. Raises as `prepare`."""
        label = label_of(sample, self.name)
        box = last_boxed(sample.response)
        answer = sample.response[-TAIL_CHARS:] if box is None else box
        if not answer.strip() or (box is not None and len(box) > MAX_ANSWER_CHARS):
            return 0.0
        return float(equal_answers(answer, label, boxed=box is not None))

    def warm_up(self) -> None:
        """Imports math-verify and its parsers."""
        equal_answers("\\frac{1}{2}", "0.5", boxed=True)
