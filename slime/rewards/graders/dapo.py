"""DAPO's rule (Yu et al., 2025, arXiv:2503.14476): the answer in the last 300 characters, score +1 or -1.

Returns a dict (`score`, `acc`, `pred`); train on it with `--reward-key score`.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader, Reward
from slime.rewards.graders.answers import last_boxed
from slime.rewards.graders.math_answer import equal_answers, label_of

TAIL_CHARS = 300
_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


@GRADERS.register("dapo")
class Dapo(Grader):
    """The answer in the last 300 characters: +1 or -1."""

    needs_label = True
    finds_box = True
    score_keys = ("score", "acc")
    held = True
    wrong: ClassVar[Reward] = {"score": -1.0, "acc": 0.0, "pred": ""}

    def prepare(self, sample: Sample) -> None:
        """Raises `DataError` on a missing or unreadable label."""
        label_of(sample, self.name)

    def grade(self, sample: Sample, limit_s: float) -> dict[str, Any]:
        """Returns `{"score": 1.0 | -1.0, "acc": 1.0 | 0.0, "pred": text}`. Raises as `prepare`."""
        label = label_of(sample, self.name)
        tail = sample.response[-TAIL_CHARS:]
        lines = _ANSWER_LINE.findall(tail)
        answer = lines[-1].strip().strip("$") if lines else last_boxed(tail)
        correct = bool(answer) and equal_answers(answer or "", label, boxed=True)
        return {"score": 1.0 if correct else -1.0, "acc": float(correct), "pred": answer or ""}
