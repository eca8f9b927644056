"""Verifiable instructions in the style of IFEval (Zhou et al., 2023, arXiv:2311.07911), with one check per id.

A check takes the response and the arguments of the instruction, and returns whether the response follows it. Checks are
language-independent: a word is a run of letters and digits, and a sentence ends with a punctuation mark.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader, Reward
from slime.rewards.graders.answers import after_thinking

# ruff: noqa: RUF001  (non-ASCII punctuation is intended)


Check = Callable[..., bool]
RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "at least": operator.ge,
    "less than": operator.lt,
    "at most": operator.le,
    "more than": operator.gt,
    "exactly": operator.eq,
}
ABBREVIATIONS = frozenset(
    ("mr", "mrs", "ms", "dr", "prof", "st", "vs", "etc", "e.g", "i.e", "cf", "no", "fig", "inc", "ltd", "jr")
)
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|$)|[。！？]+[”’」』）]*")
_BULLET = re.compile(r"^[ \t]*(?:[*+•][ \t]+|-[ \t]+|\*(?=[^*\s]))", re.MULTILINE)
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def num_sentences(text: str) -> int:
    """Counts sentences. Periods after abbreviations, initials and list numbers do not end a sentence."""
    count, start = 0, 0
    for mark in _SENTENCE_END.finditer(text):
        before = text[max(start, mark.start() - 40) : mark.start()].split()
        last = before[-1].lstrip("(\"'“").lower() if before else ""
        initial = len(last) == 1 and last.isalpha() and last != "i" and mark.group() == "."
        numbered = last.isdecimal() and len(before) == 1 and mark.group() == "."
        if not re.search(r"\w", text[start : mark.start()]):
            start = mark.end()
        elif mark.end() >= len(text.rstrip()) or not (last in ABBREVIATIONS or initial or numbered):
            count, start = count + 1, mark.end()
    return count + bool(re.search(r"\w", text[start:]))


def compare(value: int, target: Any, relation: str | None) -> bool:
    """Compares `value` with `target` by `relation` (default: at least). Raises `KeyError` for an unknown relation."""
    return RELATIONS[relation or "at least"](value, int(target))


def has_word(text: str, word: str) -> bool:
    """Returns whether a word or phrase occurs in the text, ignoring case, and not as part of a longer word."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def paragraphs(text: str, divider: str = r"\s?\*\*\*\s?") -> list[str] | None:
    """Splits the text at dividers and drops an empty first or last part. Returns None if any other part is empty."""
    parts = [part.strip() for part in re.split(divider, text)]
    parts = parts[(not parts[0]) : len(parts) - (len(parts) > 1 and not parts[-1])]
    return parts if all(parts) else None


def is_json(text: str) -> bool:
    """Returns whether the text is a JSON object or list, optionally in a code fence."""
    body = re.sub(r"^```\w*\s*\n?|\n?```$", "", text.strip()).strip()
    try:
        return isinstance(json.loads(body), dict | list)
    except (ValueError, RecursionError):
        return False


def nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Returns whether there are `num_paragraphs`, separated by blank lines, and the n-th starts with `first_word`."""
    parts = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != int(num_paragraphs) or not 0 < int(nth_paragraph) <= len(parts):
        return False
    begins = words(parts[int(nth_paragraph) - 1])
    return bool(begins) and begins[0].casefold() == first_word.strip().casefold()


def two_responses(text: str) -> bool:
    """Returns whether the text consists of two different responses separated by six asterisks."""
    parts = paragraphs(text, r"\*{6}")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def postscript(text: str, postscript_marker: str = "P.S.") -> bool:
    """Returns whether a line starts with the marker, allowing a space between its letters."""
    marker = r"\s?".join(re.escape(c) for c in postscript_marker if not c.isspace())
    return re.search(rf"^\s*{marker}.+$", text, re.IGNORECASE | re.MULTILINE) is not None


def sections(text: str, num_sections: int, section_spliter: str = "Section") -> bool:
    """Returns whether there are at least `num_sections` headings of the form `<section_spliter> <number>`."""
    found = re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+", text)
    return len(found) >= int(num_sections)


def highlights(text: str, num_highlights: int) -> bool:
    """Returns whether there are at least `num_highlights` spans marked as `*highlighted*` or `**highlighted**`."""
    found = re.findall(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*", text)
    return sum(1 for part in found if part.strip("* ")) >= int(num_highlights)


def capital_words(text: str, capital_frequency: int, capital_relation: str | None = None) -> bool:
    return compare(sum(1 for w in words(text) if w.isupper()), capital_frequency, capital_relation)


def letters(text: str, letter: str, let_frequency: int, let_relation: str | None = None) -> bool:
    return compare(text.casefold().count(letter.casefold()), let_frequency, let_relation)


def occurrences(text: str, keyword: str, frequency: int, relation: str | None = None) -> bool:
    return compare(text.casefold().count(keyword.strip().casefold()), frequency, relation)


def one_case(text: str, *, upper: bool) -> bool:
    cased = [c for c in text if c.isupper() or c.islower()]
    return bool(cased) and all(c.isupper() is upper for c in cased)


def _count(measure: Callable[[str], int], target: str, default: str = "at least") -> Check:
    """Returns a check that compares a count with the argument named `target`, using `relation`."""

    def check(text: str, relation: str | None = None, **kwargs: Any) -> bool:
        return compare(measure(text), kwargs[target], relation or default)

    return check


def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] + text[-1] in ('""', "“”")


CHECKS: Mapping[str, Check] = {
    "keywords:existence": lambda text, keywords: all(k.casefold() in text.casefold() for k in keywords),
    "keywords:frequency": occurrences,
    "keywords:forbidden_words": lambda text, forbidden_words: not any(has_word(text, w) for w in forbidden_words),
    "keywords:letter_frequency": letters,
    "length_constraints:number_words": _count(lambda text: len(words(text)), "num_words"),
    "length_constraints:number_sentences": _count(num_sentences, "num_sentences"),
    "length_constraints:number_paragraphs": _count(
        lambda text: len(paragraphs(text) or ()), "num_paragraphs", "exactly"
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph,
    "detectable_content:number_placeholders": _count(
        lambda text: len(re.findall(r"\[[^\[\]]*\]", text)), "num_placeholders"
    ),
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": _count(lambda text: len(_BULLET.findall(text)), "num_bullets", "exactly"),
    "detectable_format:constrained_response": lambda text: any(option in text for option in CONSTRAINED),
    "detectable_format:number_highlighted_sections": highlights,
    "detectable_format:multiple_sections": sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": lambda text: re.search(r"<<[^<>\n]*[^<>\s][^<>\n]*>>", text) is not None,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().casefold().startswith(prompt_to_repeat.strip().casefold())
    ),
    "startend:start_checker": lambda text, start_phrase: (
        text.strip().strip('"').casefold().startswith(start_phrase.strip().casefold())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').casefold().endswith(end_phrase.strip().casefold())
    ),
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": capital_words,
    "change_case:english_capital": lambda text: one_case(text, upper=True),
    "change_case:english_lowercase": lambda text: one_case(text, upper=False),
    "punctuation:no_comma": lambda text: not set(text) & set(",，、"),
}
"""Instruction id -> check(text, **kwargs)."""


def instructions(metadata: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Returns (id, arguments) of each instruction. Raises `DataError` if the row has none or one is unknown."""
    ids = metadata.get("instruction_id_list")
    if not isinstance(ids, list) or not ids:
        raise DataError("the ifbench grader needs metadata['instruction_id_list'] with at least one id")
    unknown = sorted({str(i) for i in ids if i not in CHECKS})
    if unknown:
        raise DataError(f"unknown instructions {unknown}; use any of {', '.join(CHECKS)}")
    kwargs = metadata.get("kwargs") or [{}] * len(ids)
    if not isinstance(kwargs, list) or len(kwargs) != len(ids):
        raise DataError(f"metadata kwargs must have one object for each of {len(ids)} ids, got {str(kwargs)!r:.100}")
    return [(i, {k: v for k, v in (k or {}).items() if v is not None}) for i, k in zip(ids, kwargs, strict=True)]


def follows(text: str, name: str, arguments: dict[str, Any]) -> bool:
    """Returns whether the text follows the instruction `name`. Empty text never does."""
    return bool(text.strip()) and CHECKS[name](text, **arguments)


def variants(text: str) -> list[str]:
    """Returns the variants of a text for the loose score (see `InstructionFollowing`)."""
    lines = text.split("\n")
    shortened = [text, "\n".join(lines[1:]).strip(), "\n".join(lines[:-1]).strip(), "\n".join(lines[1:-1]).strip()]
    return list(dict.fromkeys([*shortened, *(part.replace("*", "") for part in shortened)]))


@GRADERS.register("ifbench")
class InstructionFollowing(Grader):
    """Whether the answer follows the instructions of the row, by strict and loose criteria.

    As in IFEval's data, the row has `metadata["instruction_id_list"]` (ids in `CHECKS`) and `metadata["kwargs"]`, with
    one object of arguments per id; null arguments are ignored. Strict: the text after the last `</think>` must follow
    the instruction. Loose: a variant without its first line, last line, both, or asterisks may follow it instead.
    """

    score_keys = ("score", "loose", "strict_share", "loose_share")
    held = True
    wrong: ClassVar[Reward] = dict.fromkeys(score_keys, 0.0)

    def prepare(self, sample: Sample) -> None:
        """Raises `DataError` for unknown instructions or invalid arguments."""
        for name, arguments in instructions(sample.metadata):
            try:
                follows("A text of some words.", name, arguments)
            except (TypeError, KeyError, ValueError, AttributeError) as problem:
                raise DataError(f"the arguments {arguments} are invalid for {name}: {problem!r}") from problem

    def grade(self, sample: Sample, limit_s: float) -> dict[str, float]:
        """Returns `score` and `loose` (1.0 if all instructions are followed, else 0.0), and the fractions followed.

        Raises the same errors as `prepare`.
        """
        self.prepare(sample)
        wanted = instructions(sample.metadata)
        answer = after_thinking(sample.response).strip()
        strict = [follows(answer, name, arguments) for name, arguments in wanted]
        loose = [any(follows(v, name, arguments) for v in variants(answer)) for name, arguments in wanted]
        return {
            "score": float(all(strict)),
            "loose": float(all(loose)),
            "strict_share": sum(strict) / len(strict),
            "loose_share": sum(loose) / len(loose),
        }
