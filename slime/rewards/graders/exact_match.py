"""Exact match: 1.0 if the final answer equals the label as text, white space at the ends aside, else 0.0."""

from __future__ import annotations

from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader
from slime.rewards.graders.answers import final_answer


@GRADERS.register("exact_match")
class ExactMatch(Grader):
    """The final answer is the label."""

    needs_label = True
    held = True
    wrong = 0.0

    def prepare(self, sample: Sample) -> None:
        """Raises `DataError` without a label."""
        if sample.label is None:
            raise DataError("the exact_match grader needs a label; set --label-key")

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns 1.0 or 0.0. Raises as `prepare`."""
        self.prepare(sample)
        return float(final_answer(sample.response) == str(sample.label).strip())
