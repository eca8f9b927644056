"""Graders that compare a final answer with the label: by math-verify, by text, by token F1, by the rules of DAPO and of
reasoning models; and how the answer is found. `chance` tosses a coin.
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

# Finding the final answer in a response: the last `\boxed{}`, the last `<answer>` element, or the whole text.

ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; the whole text without one."""
    return text.rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{...}` (or `\\fbox{...}`), braces balanced; None if there is none.

    Only the last box counts, so that listing every candidate in boxes gains nothing. Linear in the length of `text`
    for each box that is never closed.
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
            return None  # a wall of unclosed boxes is not an answer, and scanning each would be quadratic
        end = start


def last_answer_element(text: str) -> str | None:
    """The content of the last `<answer>...</answer>`; None if there is none."""
    close = text.rfind(ANSWER_CLOSE)
    start = text.rfind(ANSWER_OPEN, 0, close) if close >= 0 else -1
    return text[start + len(ANSWER_OPEN) : close].strip() if start >= 0 else None


def final_answer(text: str) -> str:
    """The answer that a response commits to: `<answer>` element, else last box, else the whole text, stripped."""
    for candidate in (last_answer_element(text), last_boxed(text)):
        if candidate is not None:
            return candidate
    return text.strip()


# Mathematics: 1.0 if math-verify finds the final answer equal to the label, else 0.0.
#
# The answer is the last `\boxed{}`, else whatever math-verify extracts from the whole response. math-verify's own
# time limit is off: it rests on SIGALRM, which a long big-integer power ignores; the pool kills the worker instead.

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
    """The label as text. Raises `DataError` if it is missing."""
    if sample.label is None:
        raise DataError(f"the {grader} grader needs a label; set --label-key")
    return str(sample.label)


def math_label_of(sample: Sample, grader: str) -> str:
    """The label as text. Raises `DataError` if it is missing or `reference` cannot read it."""
    label = label_of(sample, grader)
    reference(label)
    return label


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
        math_label_of(sample, self.name)

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns 1.0 or 0.0. Raises as `prepare`."""
        label = math_label_of(sample, self.name)
        box = last_boxed(sample.response)
        answer = sample.response[-TAIL_CHARS:] if box is None else box
        if not answer.strip() or (box is not None and len(box) > MAX_ANSWER_CHARS):
            return 0.0
        return float(equal_answers(answer, label, boxed=box is not None))

    def warm_up(self) -> None:
        """Imports math-verify and its parsers."""
        equal_answers("\\frac{1}{2}", "0.5", boxed=True)


# Exact match: 1.0 if the final answer equals the label as text, white space at the ends aside, else 0.0.


@GRADERS.register("exact_match")
class ExactMatch(Grader):
    """The final answer is the label."""

    needs_label = True
    held = True
    wrong = 0.0

    def prepare(self, sample: Sample) -> None:
        """Raises `DataError` without a label."""
        label_of(sample, self.name)

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns 1.0 or 0.0. Raises as `prepare`."""
        return float(final_answer(sample.response) == label_of(sample, self.name).strip())


# Token F1 between the final answer and the label, as in SQuAD (Rajpurkar et al., 2016): 0.0 to 1.0.

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
        label_of(sample, self.name)

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns the F1 score. Raises as `prepare`."""
        answer, reference = words(final_answer(sample.response)), words(label_of(sample, self.name))
        if not answer or not reference:
            return float(answer == reference)
        common = sum((Counter(answer) & Counter(reference)).values())
        return 2.0 * common / (len(answer) + len(reference))


# Random: a coin, 0.0 or 1.0, for plumbing tests; repeatable for one response.


@GRADERS.register("random")
class Chance(Grader):
    """A repeatable coin."""

    held = True
    wrong = 0.0

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns 0.0 or 1.0 by a checksum of the execution's id and response."""
        return float(zlib.crc32(f"{sample.index}:{sample.response}".encode()) & 1)


# DAPO's rule (Yu et al., 2025, arXiv:2503.14476): the answer in the last 300 characters, score +1 or -1.
#
# Returns a dict (`score`, `acc`, `pred`); train on it with `--reward-key score`.

DAPO_TAIL_CHARS = 300
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
        math_label_of(sample, self.name)

    def grade(self, sample: Sample, limit_s: float) -> dict[str, Any]:
        """Returns `{"score": 1.0 | -1.0, "acc": 1.0 | 0.0, "pred": text}`. Raises as `prepare`."""
        label = math_label_of(sample, self.name)
        tail = sample.response[-DAPO_TAIL_CHARS:]
        lines = _ANSWER_LINE.findall(tail)
        answer = lines[-1].strip().strip("$") if lines else last_boxed(tail)
        correct = bool(answer) and equal_answers(answer or "", label, boxed=True)
        return {"score": 1.0 if correct else -1.0, "acc": float(correct), "pred": answer or ""}


# Reasoning models: the text after `</think>` (or `###Response`) must box the answer; 1.0 if it is right, else 0.0.

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
        math_label_of(sample, self.name)

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns 1.0 or 0.0; a response that never ends its thinking or boxes nothing scores 0.0."""
        for marker in MARKERS:
            _, found, answer = sample.response.rpartition(marker)
            if found:
                if last_boxed(answer) is None:
                    return 0.0
                return MathAnswer().grade(dataclasses.replace(sample, response=answer), limit_s)
        return 0.0


# The built-in graders of mathematics for reward functions that hold texts: an answer, and the reference.


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
