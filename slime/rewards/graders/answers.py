"""Graders that compare the final answer with the label: math-verify, exact match, token F1, and the rules of DAPO and
DeepScaleR. The final answer is the last `<answer>` element, the last `\\boxed{}`, or the whole text.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import string
import zlib
from collections import Counter
from typing import Any, ClassVar

from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rewards.graders import BUILT_IN_LIMIT_S, GRADERS, Grader, Reward

ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"


def after_thinking(text: str) -> str:
    """Returns the text after the last `</think>`, or the whole text if there is none."""
    return text.rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    """Returns the content of the last complete `\\boxed{...}` or `\\fbox{...}` with balanced braces, or None.

    Only the last box counts, so boxing every candidate does not help. Takes linear time per unclosed box.
    """
    end = len(text)
    while True:
        start = max(text.rfind("\\boxed{", 0, end), text.rfind("\\fbox{", 0, end))
        if start < 0:
            return None
        opening = text.index("{", start)
        depth = 0
        for position in range(opening, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[opening + 1 : position].strip()
        if end - start > 1 and text.count("\\boxed{", 0, start) > 64:
            return None  # not an answer; scanning this many unclosed boxes would take quadratic time
        end = start


def last_answer_element(text: str) -> str | None:
    """Returns the content of the last `<answer>...</answer>`, or None."""
    close = text.rfind(ANSWER_CLOSE)
    start = text.rfind(ANSWER_OPEN, 0, close) if close >= 0 else -1
    return text[start + len(ANSWER_OPEN) : close].strip() if start >= 0 else None


def final_answer(text: str) -> str:
    """Returns the last `<answer>` element, else the last box, else the whole text, stripped."""
    for candidate in (last_answer_element(text), last_boxed(text)):
        if candidate is not None:
            return candidate
    return text.strip()


MAX_ANSWER_CHARS = 2_000
"""Longer boxed answers score 0.0 without being parsed."""
TAIL_CHARS = 4_000
"""Without a box, only the end of the response is searched."""


@functools.lru_cache(maxsize=256)
def reference(label: str) -> list[Any]:
    """Parses the label with math-verify. Raises `DataError` if it contains no expression.

    Also compares the label with a number once, so that a label that takes too long is not blamed on an answer.
    """
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold: list[Any] = math_verify.parse(label if "\\boxed" in label else f"\\boxed{{{label}}}", parsing_timeout=None)
    if not gold:
        raise DataError(f"math-verify found no expression in the label {label!r:.100}; check --label-key")
    math_verify.verify(gold, math_verify.parse("\\boxed{0.1234567}", parsing_timeout=None), timeout_seconds=None)
    return gold


def equal_answers(answer: str, label: str, *, boxed: bool) -> bool:
    """Returns whether answer and label are equal according to math-verify. `boxed`: the answer comes from a box.

    Raises `DataError` if the label contains no expression.
    """
    if answer.strip() == label.strip():
        return True
    import math_verify

    gold = reference(label)
    predicted = math_verify.parse(f"\\boxed{{{answer}}}" if boxed else answer, parsing_timeout=None)
    return bool(math_verify.verify(gold, predicted, timeout_seconds=None))


class WithLabel(Grader):
    """Base class of graders that compare the final answer with a label."""

    needs_label = True
    held = True
    wrong: ClassVar[Reward | None] = 0.0

    def prepare(self, sample: Sample) -> None:
        """Raises `DataError` if the label is missing or cannot be parsed."""
        self.label_of(sample)

    def label_of(self, sample: Sample) -> str:
        """Returns the label as text. Raises `DataError` if it is missing."""
        if sample.label is None:
            raise DataError(f"the {self.name} grader needs a label; set --label-key")
        return str(sample.label)


class WithMathLabel(WithLabel):
    """Base class of graders whose label must be parsable by math-verify."""

    def label_of(self, sample: Sample) -> str:
        """Returns the label as text. Raises `DataError` if it is missing or math-verify cannot parse it."""
        label = super().label_of(sample)
        reference(label)
        return label


@GRADERS.register("math")
class MathAnswer(WithMathLabel):
    """1.0 if the final answer equals the label according to math-verify, else 0.0.

    The answer is the last `\\boxed{}`, or else what math-verify extracts from the response. math-verify's own timeout
    is off, because it relies on SIGALRM, which cannot interrupt a long power of big integers. The pool kills the
    process instead.
    """

    def grade(self, sample: Sample, limit_s: float) -> float:
        label = self.label_of(sample)
        box = last_boxed(sample.response)
        answer = sample.response[-TAIL_CHARS:] if box is None else box
        if not answer.strip() or (box is not None and len(box) > MAX_ANSWER_CHARS):
            return 0.0
        return float(equal_answers(answer, label, boxed=box is not None))

    def warm_up(self) -> None:
        equal_answers("\\frac{1}{2}", "0.5", boxed=True)


@GRADERS.register("exact_match")
class ExactMatch(WithLabel):
    """1.0 if the final answer matches the label exactly, ignoring surrounding whitespace; else 0.0."""

    def grade(self, sample: Sample, limit_s: float) -> float:
        return float(final_answer(sample.response) == self.label_of(sample).strip())


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """Returns the lower-case words of a text without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


@GRADERS.register("f1")
class TokenF1(WithLabel):
    """Token F1 between final answer and label, 0.0 to 1.0, as in SQuAD (Rajpurkar et al., 2016)."""

    def grade(self, sample: Sample, limit_s: float) -> float:
        answer, reference = words(final_answer(sample.response)), words(self.label_of(sample))
        if not answer or not reference:
            return float(answer == reference)
        common = sum((Counter(answer) & Counter(reference)).values())
        return 2.0 * common / (len(answer) + len(reference))


@GRADERS.register("random")
class Chance(Grader):
    """For tests: pseudo-random 0.0 or 1.0, determined by execution and response."""

    held = True
    wrong = 0.0

    def grade(self, sample: Sample, limit_s: float) -> float:
        return float(zlib.crc32(f"{sample.index}:{sample.response}".encode()) & 1)


DAPO_TAIL_CHARS = 300
_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


@GRADERS.register("dapo")
class Dapo(WithMathLabel):
    """DAPO's rule (Yu et al., 2025, arXiv:2503.14476): scores the answer in the last 300 characters as +1 or -1."""

    finds_box = True
    score_keys = ("score", "acc")
    wrong: ClassVar[Reward] = {"score": -1.0, "acc": 0.0, "pred": ""}

    def grade(self, sample: Sample, limit_s: float) -> dict[str, Any]:
        """Returns `{"score": 1.0 | -1.0, "acc": 1.0 | 0.0, "pred": text}`. Raises the same errors as `prepare`."""
        label = self.label_of(sample)
        tail = sample.response[-DAPO_TAIL_CHARS:]
        lines = _ANSWER_LINE.findall(tail)
        answer = lines[-1].strip().strip("$") if lines else last_boxed(tail)
        correct = bool(answer) and equal_answers(answer or "", label, boxed=True)
        return {"score": 1.0 if correct else -1.0, "acc": float(correct), "pred": answer or ""}


MARKERS = ("</think>", "###Response")


@GRADERS.register("deepscaler")
class DeepScaler(WithMathLabel):
    """For reasoning models: 1.0 if the last box after `</think>` (or `###Response`) has the right answer, else 0.0."""

    finds_box = True

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns 0.0 if the response does not end its thinking or has no box after it.

        Raises the same errors as `prepare`.
        """
        for marker in MARKERS:
            _, found, answer = sample.response.rpartition(marker)
            if found:
                if last_boxed(answer) is None:
                    return 0.0
                return MathAnswer().grade(dataclasses.replace(sample, response=answer), limit_s)
        return 0.0


def deepscaler_reward(response: str, label: object) -> float:
    """Grades like `--rm-type deepscaler`, for users' functions. Raises `DataError` if the label has no expression."""
    return DeepScaler().grade(Sample(response=response, label=label), BUILT_IN_LIMIT_S)


def dapo_score(solution: str, label: object) -> dict[str, Any]:
    """Grades like `--rm-type dapo`, for users' functions. Raises `DataError` if the label has no expression."""
    return Dapo().grade(Sample(response=solution, label=label), BUILT_IN_LIMIT_S)


def boxed_equals(solution: str, label: object) -> bool:
    """Compares the last box of a solution with the label. Raises `DataError` if the label has no expression."""
    answer, reference = last_boxed(solution), str(label)
    return answer is not None and equal_answers(answer, last_boxed(reference) or reference, boxed=True)
