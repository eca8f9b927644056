"""Reasoning models: the text after `</think>` (or `###Response`) must box the answer; 1.0 if it is right, else 0.0."""

from __future__ import annotations

import dataclasses

from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader
from slime.rewards.graders.answers import last_boxed
from slime.rewards.graders.math_answer import MathAnswer, label_of

MARKERS = ("</think>", "###Response")


@GRADERS.register("deepscaler")
class DeepScaler(Grader):
    """The box after the thinking holds the right answer."""

    needs_label = True
    finds_box = True
    held = True
    wrong = 0.0

    def prepare(self, sample: Sample) -> None:
        """Raises `DataError` on a missing or unreadable label."""
        label_of(sample, self.name)

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns 1.0 or 0.0; a response that never ends its thinking or boxes nothing scores 0.0."""
        for marker in MARKERS:
            _, found, answer = sample.response.rpartition(marker)
            if found:
                if last_boxed(answer) is None:
                    return 0.0
                return MathAnswer().grade(dataclasses.replace(sample, response=answer), limit_s)
        return 0.0
