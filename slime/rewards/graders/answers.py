"""Graders that compare the final answer with the label: math-verify, exact match, token F1, and the rules of DAPO and
DeepScaleR. For exact match and F1, the final answer is the last `<answer>` element, the last `\\boxed{}`, or the whole
text; for mathematics, it is the last box, and for DAPO the last `Answer:` line.

docs/migration.md lists the answers that the graders of other projects score differently.
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


MAX_END_TOKENS = 8
_END_TOKEN = re.compile(r"(?:<[|｜][^<>|｜\s]{1,40}[|｜]>|</s>)\Z")  # noqa: RUF001


def without_end_tokens(text: str) -> str:
    """Returns the text without control tokens of a chat template (`<|im_end|>`) and white space at its end."""
    text = text.rstrip()
    for _ in range(MAX_END_TOKENS):
        found = _END_TOKEN.search(text[-64:])
        if found is None:
            break
        text = text[: len(text) - len(found[0])].rstrip()
    return text


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
    return without_end_tokens(text).strip()


MAX_ANSWER_CHARS = 2_000
"""Longer boxed answers score 0.0 without being parsed."""


_LARGE = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_RESPELLINGS: tuple[tuple[re.Pattern[str], Any], ...] = (
    (re.compile(r"\\[ ,;:!]|[\s~.]+\Z"), " "),
    (re.compile(r"(?<![\d.])(\d+)\s+(\d+)/(\d+)"), r"(\1+\2/\3)"),
    (re.compile(r"(?<![\\a-zA-Z])pi\b"), r"\\pi "),
    (re.compile(r"\*+"), lambda m: "^" if len(m[0]) == 2 else r"\cdot "),
    (
        re.compile(r"(?i)\s*\b(thousand|million|billion|trillion)s?\b"),
        lambda m: rf"\cdot 10^{{{_LARGE[m[1].lower()]}}}",
    ),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?!\w)"), r"\1\\cdot 10^{\2}"),
)
"""Spellings of numbers that math-verify does not read, and what it reads: a mixed number, `2*pi`, `3 million`, `1e3`, a
full stop at the end."""


def respelled(text: str) -> str:
    """Returns the text in spellings that math-verify reads."""
    for pattern, spelling in _RESPELLINGS:
        text = pattern.sub(spelling, text)
    return text.strip()


@functools.lru_cache(maxsize=256)
def reference(label: str) -> tuple[list[Any], ...]:
    """Parses the label with math-verify, and again as `respelled`. Raises `DataError` if it contains no expression.

    Also compares the label with a number once, so that an answer is not blamed for a slow label.
    """
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    label = last_boxed(label) or label
    golds = tuple(
        gold
        for spelling in dict.fromkeys((label, respelled(label)))
        if (gold := math_verify.parse(f"\\boxed{{{spelling}}}", parsing_timeout=None))
    )
    if not golds:
        raise DataError(f"math-verify found no expression in the label {label!r:.100}; check --label-key")
    for gold in golds:
        math_verify.verify(gold, math_verify.parse("\\boxed{0.1234567}", parsing_timeout=None), timeout_seconds=None)
    return golds


def equal_answers(answer: str, label: str) -> bool:
    """Returns whether a short answer and the label are equal according to math-verify, in some spelling.

    Raises `DataError` if the label contains no expression.
    """
    if answer.strip() == label.strip():
        return True
    if not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return False
    import math_verify

    golds = reference(label)
    for spelling in dict.fromkeys((answer, respelled(answer))):
        predicted = math_verify.parse(f"\\boxed{{{spelling}}}", parsing_timeout=None)
        if any(math_verify.verify(gold, predicted, timeout_seconds=None) for gold in golds):
            return True
    return False


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
    """1.0 if the last `\\boxed{}` equals the label according to math-verify, else 0.0.

    math-verify's own timeout is off, because it relies on SIGALRM, which cannot interrupt a long power of big integers.
    The pool kills the process instead.
    """

    finds_box = True

    def grade(self, sample: Sample, limit_s: float) -> float:
        label = self.label_of(sample)
        return float(equal_answers(last_boxed(sample.response) or "", label))

    def warm_up(self) -> None:
        equal_answers("\\frac{1}{2}", "0.5")


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


_VERDICTS = frozenset(("yes", "no", "noanswer"))


@GRADERS.register("f1")
class TokenF1(WithLabel):
    """Token F1 between final answer and label, 0.0 to 1.0, as in HotpotQA (Yang et al., 2018).

    No answer scores 0.0, and `yes`, `no` and `noanswer` have no partial overlap with longer answers.
    """

    def grade(self, sample: Sample, limit_s: float) -> float:
        answer, reference = words(final_answer(sample.response)), words(self.label_of(sample))
        if answer != reference and any(len(side) == 1 and side[0] in _VERDICTS for side in (answer, reference)):
            return 0.0
        if not answer or not reference:
            return 0.0
        common = sum((Counter(answer) & Counter(reference)).values())
        return 2.0 * common / (len(answer) + len(reference))


@GRADERS.register("random")
class Chance(Grader):
    """For tests: pseudo-random 0.0 or 1.0, determined by execution and response."""

    held = True
    wrong = 0.0

    def grade(self, sample: Sample, limit_s: float) -> float:
        return float(zlib.crc32(f"{sample.index}:{sample.response}".encode()) & 1)


DAPO_TAIL_CHARS, STRICT_TAIL_CHARS = 300, 100
INVALID = "[INVALID]"
"""The `pred` of a response without an answer line."""
_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_WRAPPERS = re.compile(r"\\(?:text|textbf|overline|boxed|mbox|mathrm)\s*\{([^{}]*)\}")
_UNITS = re.compile(
    r"\\(?:text|mbox|mathrm)\{(?:\.|m|s|th|\s*)\}(?:\^[23])?|\^\{?\\circ\}?|\\[!; ]|\\l?dots|\{,\}|\""
    r"|\b(?:square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|pounds"
    r"|meters|meals|edges|students|multiples)\b(?:\^[23])?|\ban?\s+(?=\w)"
)


def dapo_answer(text: str) -> str:
    """Returns an answer as DAPO compares it: without units, LaTeX markup, spaces, and what precedes an equals sign.

    The rules are those of Minerva (Lewkowycz et al., 2022, appendix D.1).
    """
    text = without_end_tokens(text).rpartition("=")[2].replace("\\$", "").replace("\\%", "%")
    text = _UNITS.sub(" ", text)
    math = re.search(r"\$([^$]+)\$", text)
    text = math[1] if math else text.replace("$", "")
    while (inner := _WRAPPERS.sub(r"\1", text)) != text:
        text = inner
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{\[])", r"sqrt{\1}", text)
    return text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", text) else text


def dapo_answers_are_equal(answer: str, label: str) -> bool:
    """Returns whether both are the same text by `dapo_answer`, or equal according to math-verify."""
    answer, label = dapo_answer(answer), dapo_answer(label) or label
    return answer == label or equal_answers(answer, label)


@GRADERS.register("dapo")
class Dapo(WithMathLabel):
    """DAPO's rule (Yu et al., 2025, arXiv:2503.14476): scores the last `Answer:` line, which must be in the last 300
    characters, as +1 or -1."""

    finds_box = True
    score_keys = ("score", "acc")
    wrong: ClassVar[Reward] = {"score": -1.0, "acc": False, "pred": INVALID}

    def prepare(self, sample: Sample) -> None:
        """Raises `DataError` if the label is missing or cannot be parsed."""
        label = self.label_of(sample)
        reference(dapo_answer(label) or label)

    def grade(self, sample: Sample, limit_s: float) -> dict[str, Any]:
        """Returns `{"score": 1.0 | -1.0, "acc": bool, "pred": text}`. Raises the same errors as `prepare`."""
        label = self.label_of(sample)
        lines = _ANSWER_LINE.findall(without_end_tokens(sample.response)[-DAPO_TAIL_CHARS:])
        correct = bool(lines) and dapo_answers_are_equal(lines[-1], label)
        return _verdict(correct, dapo_answer(lines[-1]) if lines else INVALID)


def _verdict(correct: bool, pred: str | None) -> dict[str, Any]:
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


MARKERS = ("</think>", "###Response")


@GRADERS.register("deepscaler")
class DeepScaler(WithMathLabel):
    """For reasoning models: 1.0 if the last box after `</think>` (or `###Response`) has the right answer, else 0.0."""

    finds_box = True

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns 0.0 if the thinking is never closed or no box follows it.

        Raises the same errors as `prepare`.
        """
        for marker in MARKERS:
            _, found, answer = sample.response.rpartition(marker)
            if found:
                return MathAnswer().grade(dataclasses.replace(sample, response=answer), limit_s)
        return 0.0


def deepscaler_reward(response: str, label: object) -> float:
    """Grades like `--rm-type deepscaler`, for users' functions; 0.0 for an empty label. Raises `DataError` if the label
    has no expression."""
    return DeepScaler().grade(Sample(response=response, label=label), BUILT_IN_LIMIT_S) if _text(label) else 0.0


def dapo_score(solution: str, label: object, strict_box_verify: bool = False) -> dict[str, Any]:
    """Grades like `--rm-type dapo`, for users' functions. `strict_box_verify`: the last 100 characters must have a box
    whose content is the label; without a box, `pred` is None. Raises `DataError` if the label has no expression."""
    if not strict_box_verify:
        return Dapo().grade(Sample(response=solution, label=label), BUILT_IN_LIMIT_S)
    box = last_boxed(solution[-STRICT_TAIL_CHARS:])
    return _verdict(box is not None and box == _text(label), box)


def boxed_equals(solution: str, label: object) -> bool:
    """Compares the last box of a solution with the label; False for an empty label. Raises `DataError` if the label has
    no expression."""
    answer, reference = last_boxed(solution), _text(label)
    return bool(answer and reference) and equal_answers(answer or "", last_boxed(reference) or reference)


def _text(label: object) -> str:
    return "" if label is None else str(label).strip()
