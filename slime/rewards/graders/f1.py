"""Token F1 between the final answer and the label, as in SQuAD (Rajpurkar et al., 2016): 0.0 to 1.0."""

from __future__ import annotations

import re
import string
from collections import Counter

from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader
from slime.rewards.graders.answers import final_answer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """Lower-cased words without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


@GRADERS.register("f1")
class TokenF1(Grader):
    """Token F1 of the final answer and the label."""

    needs_label = True
    held = True
    wrong = 0.0

    def prepare(self, sample: Sample) -> None:
        """Raises `DataError` without a label."""
        if sample.label is None:
            raise DataError("the f1 grader needs a label; set --label-key")

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns the F1 score. Raises as `prepare`."""
        self.prepare(sample)
        answer, reference = words(final_answer(sample.response)), words(str(sample.label))
        if not answer or not reference:
            return float(answer == reference)
        common = sum((Counter(answer) & Counter(reference)).values())
        return 2.0 * common / (len(answer) + len(reference))
