"""Multiple choice (GPQA; Rein et al., 2023, arXiv:2311.12022): 1.0 if the answer commits to the right letter, else 0.0.

The right letter is `metadata["correct_letter"]`, or else the label: a letter (`C`, `(C)`, `C. text`), the text of a
choice, or its 0-based index. `metadata["choices"]` lists the texts of the choices in order (or by letter), and
`metadata["valid_letters"]` their letters. Without both, the letters are A to H, or up to the right letter.

The answer is the first of these found after the last `</think>`: the `<answer>` element, the last box, the last
"answer is C", or the last letter in the final line. Without any, the text of the right choice (or the label) counts, if
it occurs and that of no other choice does. Several letters in one place do not count as an answer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader
from slime.rewards.graders.answers import after_thinking, last_answer_element, last_boxed, without_end_tokens

TAIL_CHARS = 4_000
"""Without a marked answer, only the end of the response is searched."""
MAX_MARKED_CHARS = 500
"""Longer marked answers are prose, not a choice."""
DEFAULT_LETTERS = 8
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathsf|mathit|boxed|bf|rm)\s*\{([^{}]*)\}")
_SAID = re.compile(
    r"\b(?:answer|choice|option|solution)\b[^\S\n]*(?:(?:would|should|must|will|can only)[^\S\n]+be|is|was|:|=|->|→)"
    r"[^\S\n]*(?:(?:most likely|therefore|thus|clearly|definitely|option|choice|answer|letter|is|:)[^\S\n]*){0,3}",
    re.IGNORECASE,
)
_CHOSEN = re.compile(
    r"\b(?:choose|pick|select|go(?:ing)?[^\S\n]+with)[^\S\n]+(?:(?:the|option|choice|answer|letter)[^\S\n]+){0,2}",
    re.IGNORECASE,
)
_CORRECT = re.compile(r"(?<![A-Za-z0-9'])[(\[]?([A-Z])[)\]]?[^\S\n]+is[^\S\n]+(?:the[^\S\n]+)?(?:correct|right|best)\b")
_ALONE = re.compile(r"(?<![A-Za-z0-9'])[A-Z](?![A-Za-z0-9'])")
_DENIED = re.compile(r"\bnot\b|n't\b|\bneither\b|\bnor\b|\bwrong\b", re.IGNORECASE)
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
    answer = without_end_tokens(after_thinking(response))
    for marked in (last_answer_element(answer), last_boxed(answer)):
        if marked is not None:
            return choice_of(marked, letters, choices) if len(marked) <= MAX_MARKED_CHARS else None
    tail = plain(answer[-TAIL_CHARS:]).strip()
    return said_letter(tail, letters) or last_letter(tail.splitlines()[-1].strip() if tail else "", letters)


def said_letter(text: str, letters: str) -> str | None:
    """Returns the letter of the last "the answer is C", "I choose C" or "C is correct"."""
    said = []
    for pattern in (_SAID, _CHOSEN):
        for found in pattern.finditer(text):
            letter = leading_letter(text[found.end() : found.end() + MAX_MARKED_CHARS], letters, marked=False)
            said.append((found.end(), letter))
    said += [(found.start(1), found[1] if found[1] in letters else None) for found in _CORRECT.finditer(text)]
    return next((letter for _, letter in sorted(said, key=lambda one: -one[0]) if letter), None)


def last_letter(line: str, letters: str) -> str | None:
    """Returns the letter at the start of a final line, if punctuation follows, or its only letter, at its end."""
    found = _LETTER.match(line)
    if found is not None and (found.end() == len(line) or line[found.end() - 1] == ")" or line[found.end()] in ".:)"):
        return leading_letter(line, letters, marked=True)
    alone = [letter for letter in _ALONE.findall(line) if letter in letters]
    ends = re.search(r"[A-Z][)\].\s]*\Z", line)
    if len(set(alone)) != 1 or ends is None or _DENIED.search(line):
        return None
    return alone[0] if ends[0][0] == alone[0] and _ALONE.match(line, ends.start()) else None


def letters_of(metadata: Mapping[str, Any], choices: Sequence[str]) -> str:
    """Returns the letters of the choices, in order."""
    valid = metadata.get("valid_letters")
    if valid:
        return "".join(str(letter).strip().upper() for letter in valid)
    return ALPHABET[: len(choices) or DEFAULT_LETTERS]


def choices_of(sample: Sample) -> list[str]:
    """Returns the choices of the row as `folded` texts."""
    choices = sample.metadata.get("choices") or ()
    return [folded(str(choice)) for choice in (choices.values() if isinstance(choices, Mapping) else choices)]


def correct_letter(sample: Sample, choices: Sequence[str], letters: str) -> str | None:
    """Returns the letter of the right choice, or None if a row without choices has a text as its label.

    Raises `DataError` if the row names no choice.
    """
    given = sample.metadata.get("correct_letter")
    label = sample.label if given is None else given
    text = folded(str(label))
    if text in choices and choices.count(text) == 1:
        return letters[choices.index(text)]
    is_index = isinstance(label, int) or (bool(choices) and str(label).strip().isdecimal())
    if is_index and not isinstance(label, bool) and 0 <= int(str(label)) < len(choices or letters):
        return letters[int(str(label))]
    letter = None if label is None else leading_letter(plain(str(label)), ALPHABET, marked=True)
    if letter is not None and (letter in letters or not (choices or sample.metadata.get("valid_letters"))):
        return letter
    if label is None or not text or choices or isinstance(label, int):
        raise DataError(
            f"the label {label!r:.100} matches none of the {len(choices)} choices; the gpqa grader needs a letter, the "
            "text of a choice, or, with metadata['choices'], its 0-based index"
        )
    return None


def says_only(response: str, right: str, choices: Sequence[str]) -> bool:
    """Returns whether the answer contains the text of the right choice, and that of no other."""
    answer = folded(without_end_tokens(after_thinking(response))[-TAIL_CHARS:])
    pattern = rf"(?<!\w){re.escape(right)}(?!\w)"
    if not right or re.search(pattern, answer) is None:
        return False
    rest = re.sub(pattern, " ", answer)
    others = [choice for choice in choices if choice and choice != right]
    return not any(
        re.search(rf"(?<!\w){re.escape(choice)}(?!\w)", answer if right in choice else rest) for choice in others
    )


@GRADERS.register("gpqa")
class MultipleChoice(Grader):
    """1.0 if the answer commits to the right letter, else 0.0."""

    held = True
    wrong = 0.0

    def prepare(self, sample: Sample) -> None:
        """Raises `DataError` if the label names no choice."""
        choices = choices_of(sample)
        correct_letter(sample, choices, letters_of(sample.metadata, choices))

    def grade(self, sample: Sample, limit_s: float) -> float:
        choices = choices_of(sample)
        letters = letters_of(sample.metadata, choices)
        right = correct_letter(sample, choices, letters)
        if right is not None and right not in letters:
            letters = ALPHABET[: ALPHABET.index(right) + 1]
        letter = extract_letter(sample.response, letters, choices)
        if letter is not None and right is not None:
            return float(letter == right)
        answer = after_thinking(sample.response)
        if last_answer_element(answer) is not None or last_boxed(answer) is not None:
            return 0.0
        place = letters.index(right) if right is not None else len(choices)
        text = choices[place] if place < len(choices) else folded(str(sample.label))
        return float(len(text) > 1 and says_only(sample.response, text, choices))
