"""Multiple choice (GPQA; Rein et al., 2023, arXiv:2311.12022): 1.0 if the answer commits to the right letter, else 0.0.

The label is a letter (`C`, `(C)`, `C. text`), the text of a choice, or, with choices, its 0-based index.
`metadata["choices"]` lists the texts of the choices in order. Without it, the letters are A to D, or up to the label's
letter. The answer is the first of these found after the last `</think>`: the `<answer>` element, the last box, the last
"answer is C", or a final line that is a single letter. Several letters in one place, or a letter in prose, do not count
as an answer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader
from slime.rewards.graders.answers import after_thinking, last_answer_element, last_boxed

TAIL_CHARS = 4_000
"""Without a marked answer, only the end of the response is searched."""
MAX_MARKED_CHARS = 500
"""Longer marked answers are prose, not a choice."""
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathsf|mathit|boxed|bf|rm)\s*\{([^{}]*)\}")
_SAID = re.compile(
    r"\b(?:answer|choice|option|solution)\b[^\S\n]*(?:(?:would|should|must|will|can only)[^\S\n]+be|is|was|:|=|->|→)"
    r"[^\S\n]*(?:(?:most likely|therefore|thus|clearly|definitely|option|choice|answer|letter|is|:)[^\S\n]*){0,3}",
    re.IGNORECASE,
)
_LETTER = re.compile(r"[\s(\[{\"'`]*([A-Za-z])(?![A-Za-z0-9])[)\]}\"'`]*")
_NAMED = re.compile(
    r"\s*(?:the\s+)?(?:correct\s+|final\s+|best\s+)*(?:answer|option|choice)\b(?:\s+is)?[\s:=]*", re.IGNORECASE
)
_MORE = re.compile(
    r"\s*(?:,|/|&|;|\bor\b|\band\b)\s*(?:\b(?:or|and)\b\s*)?(?:option\s*)?[(\[]?([A-Za-z])(?![A-Za-z0-9'])"
)
_PROSE = re.compile(r"\s+(?!because|since|as\b|due|for\b|which|given|based|with|by\b|in\b|on\b|from)[a-z]")


def plain(text: str) -> str:
    """Removes LaTeX and Markdown markup, and converts full-width letters to ASCII."""
    text = unicodedata.normalize("NFKC", text)
    for _ in range(3):  # \text{\textbf{C}}
        text = _WRAPPED.sub(r" \1 ", text)
    return re.sub(r"[*_$\\]+", "", text)


def folded(text: str) -> str:
    """Normalizes the text of a choice for comparison."""
    return " ".join(plain(text).split()).casefold().rstrip(".")


def leading_letter(text: str, letters: str, *, marked: bool) -> str | None:
    """Returns the letter at the start of `text`; None if it is a word of prose, or the first of several letters."""
    found = _LETTER.match(text)
    if found is None or found[1].upper() not in letters:
        return None
    rest = text[found.end() :]
    bare = found[0].strip() == found[1]
    more = _MORE.match(rest)
    if more is not None and more[1].upper() in letters and (more[1].isupper() or not found[1].isupper()):
        return None
    if bare and found[1].islower() and re.match(r"\s*(?:[.,:;)]|$)", rest) is None:
        return None  # "the answer is a ..."
    if bare and not marked and found[1] in "AI" and _PROSE.match(rest):
        return None  # "The answer is A matter of ..."
    return found[1].upper()


def choice_of(text: str, letters: str, choices: Sequence[str]) -> str | None:
    """Returns the letter of a marked answer, which can be a letter or the text of a choice."""
    words = folded(text)
    same = [letter for letter, choice in zip(letters, choices, strict=False) if words == choice]
    if len(same) == 1:
        return same[0]
    bare = plain(text)
    named = _NAMED.match(bare)
    return leading_letter(bare[named.end() :] if named else bare, letters, marked=True)


def extract_letter(response: str, letters: str, choices: Sequence[str] = ()) -> str | None:
    """Returns the letter to which the response commits, or None. `choices`: `folded` texts in letter order."""
    answer = after_thinking(response)
    for marked in (last_answer_element(answer), last_boxed(answer)):
        if marked is not None:
            return choice_of(marked, letters, choices) if len(marked) <= MAX_MARKED_CHARS else None
    tail = plain(answer[-TAIL_CHARS:]).strip()
    said = [letter for m in _SAID.finditer(tail) if (letter := leading_letter(tail[m.end() :], letters, marked=False))]
    if said:
        return said[-1]
    last = tail.splitlines()[-1].strip() if tail else ""
    found = _LETTER.match(last)
    whole = found is not None and (
        found.end() == len(last) or last[found.end() - 1] == ")" or last[found.end()] in ".:)"
    )
    return leading_letter(last, letters, marked=True) if whole else None


def choices_of(sample: Sample) -> list[str]:
    """Returns the choices of the row as `folded` texts."""
    return [folded(str(choice)) for choice in sample.metadata.get("choices") or ()]


def correct_letter(sample: Sample, choices: Sequence[str]) -> str:
    """Returns the letter of the correct choice. Raises `DataError` if the label names no choice."""
    label = sample.label
    if label is None:
        label = sample.metadata.get("correct_letter")
    text = folded(str(label))
    if text in choices and choices.count(text) == 1:
        return ALPHABET[choices.index(text)]
    if choices and str(label).strip().isdecimal() and int(label) < len(choices):
        return ALPHABET[int(label)]
    letter = None if label is None else leading_letter(plain(str(label)), ALPHABET, marked=True)
    if letter is None or (choices and ALPHABET.index(letter) >= len(choices)):
        raise DataError(
            f"the label {label!r:.100} matches none of the {len(choices)} choices; the gpqa grader needs a letter, the "
            "text of a choice, or, with metadata['choices'], its 0-based index"
        )
    return letter


@GRADERS.register("gpqa")
class MultipleChoice(Grader):
    """1.0 if the answer commits to the right letter, else 0.0."""

    held = True
    wrong = 0.0

    def prepare(self, sample: Sample) -> None:
        """Raises `DataError` if the label names no choice."""
        correct_letter(sample, choices_of(sample))

    def grade(self, sample: Sample, limit_s: float) -> float:
        choices = choices_of(sample)
        right = correct_letter(sample, choices)
        letters = ALPHABET[: len(choices) or max(4, ALPHABET.index(right) + 1)]
        return float(extract_letter(sample.response, letters, choices) == right)
