"""Verifiable instructions of IFEval (Zhou et al., 2023, arXiv:2311.07911) and IFBench (Pyatkin et al., 2025,
arXiv:2507.02833), with one check per id.

A check takes the response and the arguments of the instruction, and returns whether the response follows it. IFEval's
checks are language-independent: a word is a run of letters and digits, and a sentence ends with a punctuation mark.
IFBench's instructions are about English.
"""

from __future__ import annotations

import itertools
import json
import operator
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader, Reward
from slime.rewards.graders.answers import after_thinking, without_end_tokens

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


def sentences(text: str) -> list[str]:
    """Splits the text. Periods after abbreviations, initials and list numbers do not end a sentence."""
    found, start = [], 0
    for mark in _SENTENCE_END.finditer(text):
        before = text[max(start, mark.start() - 40) : mark.start()].split()
        last = before[-1].lstrip("(\"'“").lower() if before else ""
        initial = len(last) == 1 and last.isalpha() and last != "i" and mark.group() == "."
        numbered = last.isdecimal() and len(before) == 1 and mark.group() == "."
        if not re.search(r"\w", text[start : mark.start()]):
            start = mark.end()
        elif mark.end() >= len(text.rstrip()) or not (last in ABBREVIATIONS or initial or numbered):
            found.append(text[start : mark.end()].strip())
            start = mark.end()
    return [*found, text[start:].strip()] if re.search(r"\w", text[start:]) else found


def num_sentences(text: str) -> int:
    return len(sentences(text))


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


# ---- IFBench --------------------------------------------------------------------------------------------------------

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_EDGES = string.punctuation + string.whitespace
CONJUNCTIONS = frozenset(words("and but for nor or so yet"))
PRONOUNS = frozenset(
    words(
        "i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself "
        "we us our ours ourselves they them their theirs themselves"
    )
)
"""Personal, possessive and reflexive pronouns."""
STOP_WORDS = frozenset(
    words(
        "i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers "
        "herself it its itself they them their theirs themselves what which who whom this that these those am is "
        "are was were be been being have has had having do does did doing a an the and but if or because as until "
        "while of at by for with about against between into through during before after above below to from up down "
        "in out on off over under again further then once here there when where why how all any both each few more "
        "most other some such no nor not only own same so than too very s t can will just don should now d ll m o "
        "re ve y ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn weren won "
        "wouldn"
    )
)
"""NLTK's English stop words, without those that have an apostrophe."""
CAPITALS: Mapping[str, float] = {
    **{"Reykjavik": 64.1, "Helsinki": 60.2, "Oslo": 59.91, "Tallinn": 59.44, "Stockholm": 59.33, "Riga": 56.9},
    **{"Moscow": 55.76, "Copenhagen": 55.68, "Vilnius": 54.7, "Minsk": 53.9, "Dublin": 53.3, "Berlin": 52.5},
    **{"Amsterdam": 52.4, "Warsaw": 52.23, "London": 51.5, "Brussels": 50.8, "Kyiv": 50.4, "Prague": 50.1},
    **{"Luxembourg": 49.6, "Paris": 48.9, "Vienna": 48.21, "Bratislava": 48.15, "Budapest": 47.5, "Vaduz": 47.1},
    **{"Chisinau": 47.0, "Bern": 46.9, "Ljubljana": 46.1, "Zagreb": 45.8},
}
"""Capitals north of 45 degrees, with their latitude. IFBench's own answer leaves Kyiv out, so both answers count."""
NUM_COUNTRIES = 52
"""Lines that a list of Africa's 54 countries has at least."""


def bare_words(text: str) -> list[str]:
    """Returns the lower-case words between spaces, without punctuation."""
    return text.lower().translate(_NO_PUNCTUATION).split()


def ascii_of(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def closing_marks(text: str) -> Counter[str]:
    """Counts how sentences end: with a full stop, a question mark or an exclamation mark."""
    return Counter(one.rstrip("\"'”’)] ")[-1:] for one in sentences(text))


def pairs_all(test: Callable[[Any, Any], bool], items: Sequence[Any]) -> bool:
    """Returns whether the test holds for each item and the next."""
    return all(test(one, following) for one, following in itertools.pairwise(items))


def trigram_overlap(text: str, reference_text: str, percentage: float) -> bool:
    """Returns whether `percentage` (give or take 2) of the response's trigrams of characters are in the reference."""

    def trigrams(of: str) -> set[str]:
        return {of[i : i + 3] for i in range(len(of) - 2)}

    own, others = trigrams(text), trigrams(reference_text)
    return bool(own) and abs(100 * len(own & others) / len(own) - float(percentage)) <= 2


def alliterations(sentence: str) -> int:
    """Counts the words that begin like a neighbour."""
    initials = [word[0] for word in (w.lstrip(_EDGES) for w in sentence.lower().split()) if word]
    runs = (len(list(run)) for _, run in itertools.groupby(initials))
    return sum(length for length in runs if length > 1)


def alphabet_loop(text: str) -> bool:
    initials = [word[0] for word in bare_words(text)]
    return (
        bool(initials)
        and initials[0] in string.ascii_lowercase
        and pairs_all(lambda a, b: b in string.ascii_lowercase and (ord(b) - ord(a)) % 26 == 1, initials)
    )


def all_punctuation(text: str) -> bool:
    """Returns whether all of `. , ! ? ; :` and an interrobang occur."""
    rest = re.sub(r"\?!|!\?|‽", "", text, count=1)
    return rest != text and set(".,!?;:") <= set(rest)


BRACKETS: Mapping[str, str] = {"(": ")", "[": "]", "{": "}"}
QUOTES: Mapping[str, str] = {'"': '"', "'": "'"}


def closed_levels(text: str, closes: Mapping[str, str]) -> int:
    """Returns the deepest nesting of marks that are closed. `closes`: opening mark -> its closing mark."""
    open_ones: list[tuple[str, int]] = []  # the closing mark, and the levels closed within
    deepest = 0
    for char in text:
        if open_ones and char == open_ones[-1][0]:
            levels = open_ones.pop()[1] + 1
            deepest = max(deepest, levels)
            if open_ones:
                mark, within = open_ones.pop()
                open_ones.append((mark, max(within, levels)))
        elif char in closes:
            open_ones.append((closes[char], 0))
        elif char in closes.values():
            open_ones.clear()
    return deepest


def is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


def one_option(text: str, options: str) -> bool:
    """Returns whether the text is one of the options, which slashes, commas or `or` separate."""
    listed = re.split(r"/|,|\bor\b", options)
    return text.strip(_EDGES).casefold() in {one.strip(_EDGES).casefold() for one in listed} - {""}


PICTOGRAPHS = (
    *(range(0x1F000, 0x1FB00), range(0x2600, 0x27C0), range(0x231A, 0x231C), range(0x23E9, 0x23FB)),
    *((0x203C,), (0x2049,), (0x2B50,), (0x2B55,)),
)


def is_emoji(char: str) -> bool:
    """Returns whether the character is in a block of pictographs of Unicode."""
    code = ord(char)
    return any(code in block for block in PICTOGRAPHS)


_NEXT = re.compile(r"\s*(.?)", re.DOTALL)


def emoji_after_each(text: str) -> bool:
    """Returns whether each sentence ends with an emoji, before or after its mark."""
    text = text.replace("\ufe0f", "")  # asks for the coloured form of an emoji
    end, ends_well = 0, []
    for one in sentences(text):
        end = text.index(one, end) + len(one)
        following = _NEXT.match(text, end)
        ends_well.append(any(is_emoji(c) for c in one.rstrip(_EDGES)[-1:] + (following[1] if following else "")))
    return bool(ends_well) and all(ends_well)


def three_alike(text: str) -> bool:
    """Returns whether there are three sentences of equal length that share no word."""
    parts, used = sentences(text), bare_words(text)
    return len(parts) == 3 and len({len(part) for part in parts}) == 1 and len(used) == len(set(used))


def every_nth_japanese(text: str, N: int) -> bool:
    chosen = [word.strip(_EDGES) for word in text.split()[int(N) - 1 :: int(N)]]
    return all(re.search("[\u3040-\u30ff\u4e00-\u9fff]", w) for w in chosen if w and not w.isdigit())


def keyword_in_sentence(text: str, word: str, N: int) -> bool:
    parts = sentences(text)
    return len(parts) >= int(N) > 0 and has_word(parts[int(N) - 1], word)


def syllables(word: str) -> int:
    """Estimates the syllables of an English word by its groups of vowels."""
    groups = len(re.findall(r"[aeiouy]+", word))
    silent = re.search(r"[^aeiouyl]e$|[^aeiouytd]ed$|[aeiouy]le$", word) is not None
    return max(1, groups - silent)


def last_begins_next(text: str) -> bool:
    parts = [bare_words(part) for part in sentences(text)]
    return all(parts) and pairs_all(lambda a, b: a[-1] == b[0], parts)


def ends_as_it_begins(text: str) -> bool:
    parts = [bare_words(line) for line in text.split("\n")]
    return all(part[0] == part[-1] for part in parts if part)


def stairs(text: str) -> bool:
    indents = [len(line) - len(line.lstrip(" ")) for line in text.split("\n") if line.strip()]
    return pairs_all(operator.lt, indents)


def quotes_are_explained(text: str) -> bool:
    """Returns whether words follow each quotation, before the next one."""
    behind = re.split(r'"[^"]*"|“[^”]*”', text)[1:]
    return all(re.search(r"\w", part) for part in behind)


def bullets_have_sub_bullets(text: str) -> bool:
    """Returns whether there are bullets (`*`), and each has a sub-bullet (`-`) before the next."""
    marks = "".join(line.strip()[:1] for line in text.split("\n") if line.strip()[:1] in ("*", "-"))
    return "*" in marks and "**" not in marks and not marks.endswith("*")


def thesis(text: str) -> bool:
    found = re.search(r"<(i|em)>(.*?)</\1>(.*)", text, re.DOTALL)
    return found is not None and bool(found[2].strip()) and bool(found[3].strip())


def sentences_then_bullets(text: str) -> bool:
    """Returns whether at least two sentences come first, then at least two lines that begin with `*`, and nothing."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    first = next((i for i, line in enumerate(lines) if line.startswith("*")), len(lines))
    bullets = lines[first:]
    begun = sum(num_sentences(line) for line in lines[:first])
    return begun >= 2 and len(bullets) >= 2 and all(line.startswith("*") for line in bullets)


_OPTION = re.compile(r"\(?[A-Ea-e][.):]")


def four_questions(text: str) -> bool:
    """Returns whether there are four questions with five options each, each question longer than the one before."""
    lengths: list[int] = []
    num_options: list[int] = []
    for line in (one.strip() for one in text.split("\n")):
        if line.startswith("Question"):
            lengths.append(len(line))
            num_options.append(0)
        elif not lengths:
            return False
        elif _OPTION.match(line):
            num_options[-1] += 1
        elif not num_options[-1]:
            lengths[-1] += len(line)
    return num_options == [5] * 4 and pairs_all(operator.lt, lengths)


def countries_reversed(text: str) -> bool:
    lines = [ascii_of(line.strip(_EDGES)) for line in text.split("\n") if line.strip(_EDGES)]
    first = next((i for i, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    return len(lines) - first >= NUM_COUNTRIES and pairs_all(operator.ge, lines[first:])


def words_reversed(text: str) -> bool:
    """Returns whether the words, read backwards, name the bald eagle in one sentence."""
    return "bald eagle" in " ".join(reversed(bare_words(text))) and num_sentences(text.strip()) <= 1


def story_by_alphabet(text: str) -> bool:
    initials = [part.lstrip(_EDGES)[:1].lower() for part in sentences(text)]
    return initials == list(string.ascii_lowercase)


def fields(line: str, delimiter: str) -> list[str]:
    """Splits a line at the delimiters outside quotes; fields keep their quotes."""
    parts = line.split('"')  # every second one is quoted
    parts[::2] = [part.replace(delimiter, "\0") for part in parts[::2]]
    return [field.strip() for field in '"'.join(parts).split("\0")]


def table(text: str, header: Sequence[str], num_rows: int, *, delimiter: str = ",") -> list[list[str]] | None:
    """Returns the fields of header and rows, or None if header or size differ."""
    rows = [fields(line, delimiter) for line in text.strip().split("\n")]
    if len(rows) != num_rows + 1 or any(len(row) != len(header) for row in rows):
        return None
    return rows if [field.strip('"') for field in rows[0]] == list(header) else None


def is_quoted(field: str) -> bool:
    return len(field) > 1 and field[0] == field[-1] == '"'


def csv_of_cities(text: str) -> bool:
    return table(text, ("ID", "Country", "City", "Year", "Count"), 7) is not None


def csv_with_special_character(text: str) -> bool:
    rows = table(text, ("ProductID", "Category", "Brand", "Price", "Stock"), 14)
    return rows is not None and any(is_quoted(f) and re.search(r"[^\w\s]", f[1:-1]) for row in rows[1:] for f in row)


def csv_quoted(text: str) -> bool:
    rows = table(text, ("StudentID", "Subject", "Grade", "Semester", "Score"), 3, delimiter="\t")
    return rows is not None and all(is_quoted(field) for row in rows for field in row)


def napoleons_dates(text: str) -> bool:
    days = {**dict.fromkeys(range(1, 13), 31), **dict.fromkeys((4, 6, 9, 11), 30), 2: 29}
    found = [re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)", date.strip()) for date in text.strip().split(",")]
    return all(m and 1769 <= int(m[1]) <= 1821 and 1 <= int(m[3]) <= days.get(int(m[2]), 0) for m in found)


def keywords_often(text: str, **keywords: str) -> bool:
    """Returns whether `keyword1` to `keyword5` occur 1, 2, 3, 5 and 7 times."""
    wanted = {keywords[f"keyword{i + 1}"].strip(): times for i, times in enumerate((1, 2, 3, 5, 7))}
    return all(
        len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)) == n for word, n in wanted.items()
    )


def keyword_at(text: str, keyword: str, n: int, m: int) -> bool:
    parts = sentences(text)
    row = words(parts[int(n) - 1]) if len(parts) >= int(n) > 0 else []
    return len(row) >= int(m) > 0 and row[int(m) - 1].lower() == keyword.strip().lower()


def keyword_second_from_both_ends(text: str, keyword: str) -> bool:
    row = [word.lower() for word in words(text)]
    return len(row) > 1 and row[1] == row[-2] == keyword.strip().lower()


def repeated_but_first_word(text: str, prompt_to_repeat: str) -> bool:
    return text != prompt_to_repeat and text.split()[1:] == prompt_to_repeat.split()[1:]


def span_of_words(text: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    return text.lower().split() == prompt_to_repeat.lower().split()[int(n_start) : int(n_end) + 1]


def title_case(text: str) -> bool:
    return not any(word[0].islower() for word in re.findall(r"[^\W\d_][\w'’]*", text))


_NAMES = re.compile(r"list of person names:([^.\n]+)")


def names_of(prompt: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names that a prompt of `count:person_names` lists. Raises `DataError` if there is no list."""
    found = _NAMES.search(prompt if isinstance(prompt, str) else str(prompt))
    if found is None:
        raise DataError("count:person_names needs a prompt with 'list of person names:' and names")
    return [name.strip() for name in found[1].split(",")]


def names_in(text: str, N: int, names: Sequence[str]) -> bool:
    return sum(has_word(text, name) for name in names) >= int(N)


def capitals_by_latitude(text: str) -> bool:
    named = [city.strip() for city in ascii_of(text).split(",") if city.strip()]
    ordered = sorted(CAPITALS, key=lambda city: -CAPITALS[city])
    return named in (ordered, [city for city in ordered if city != "Kyiv"])


def one_more_each(text: str, small_n: int) -> bool:
    counts = [len(bare_words(part)) for part in sentences(text)]
    return pairs_all(lambda a, b: b == a + int(small_n), counts)


def stop_word_share(text: str, percentage: float) -> bool:
    row = [word.lower() for word in words(text)]
    return bool(row) and 100 * sum(word in STOP_WORDS for word in row) / len(row) <= float(percentage)


def _at_least(measure: Callable[[str], int]) -> Check:
    return lambda text, N: measure(text) >= int(N)


IFBENCH: Mapping[str, Check] = {
    "count:word_count_range": lambda text, min_words, max_words: int(min_words) <= len(words(text)) <= int(max_words),
    "count:unique_word_count": _at_least(lambda text: len({word.strip(_EDGES) for word in text.lower().split()})),
    "count:conjunctions": lambda text, small_n: len(CONJUNCTIONS & {*bare_words(text)}) >= int(small_n),
    "count:person_names": names_in,
    "count:numbers": lambda text, N: len(re.findall(r"\d+", text.translate(_NO_PUNCTUATION))) == int(N),
    "count:punctuation": all_punctuation,
    "count:words_japanese": every_nth_japanese,
    "count:pronouns": _at_least(lambda text: sum(word in PRONOUNS for word in words(text.lower()))),
    "count:keywords_multiple": keywords_often,
    "ratio:stop_words": stop_word_share,
    "ratio:sentence_type": lambda text: closing_marks(text)["."] == 2 * closing_marks(text)["?"],
    "ratio:sentence_balance": lambda text: len({closing_marks(text)[mark] for mark in ".?!"}) == 1,
    "ratio:overlap": trigram_overlap,
    "ratio:sentence_words": three_alike,
    "words:alphabet": alphabet_loop,
    "words:vowel": lambda text: "\n" not in text.strip() and len(set("aeiou") & set(text.lower())) <= 3,
    "words:consonants": lambda text: all(re.search(r"[b-df-hj-np-tv-z]{2}", word) for word in text.lower().split()),
    "words:palindrome": lambda text: sum(len(w) > 4 and w == w[::-1] for w in bare_words(text)) >= 10,
    "words:prime_lengths": lambda text: all(is_prime(len(word)) for word in bare_words(text)),
    "words:repeats": lambda text, small_n: all(n <= int(small_n) for n in Counter(bare_words(text)).values()),
    "words:odd_even_syllables": lambda text: pairs_all(
        lambda a, b: a != b, [syllables(word) % 2 for word in bare_words(text)]
    ),
    "words:last_first": last_begins_next,
    "words:paragraph_last_first": ends_as_it_begins,
    "words:no_consecutive": lambda text: pairs_all(lambda a, b: a[0] != b[0], bare_words(text)),
    "words:keywords_specific_position": keyword_at,
    "words:words_position": keyword_second_from_both_ends,
    "sentence:alliteration_increment": lambda text: pairs_all(operator.lt, [*map(alliterations, sentences(text))]),
    "sentence:keyword": keyword_in_sentence,
    "sentence:increment": one_more_each,
    "format:parentheses": lambda text: closed_levels(text, BRACKETS) >= 5,
    "format:quotes": lambda text: closed_levels(text, QUOTES) >= 3,
    "format:options": one_option,
    "format:newline": lambda text: (
        len([*filter(str.strip, text.translate(_NO_PUNCTUATION).split("\n"))]) == len(bare_words(text))
    ),
    "format:emoji": emoji_after_each,
    "format:line_indent": stairs,
    "format:quote_unquote": quotes_are_explained,
    "format:list": lambda text, sep: text.count(sep) >= 2,
    "format:thesis": thesis,
    "format:sub-bullets": bullets_have_sub_bullets,
    "format:no_bullets_bullets": sentences_then_bullets,
    "format:title_case": title_case,
    "format:output_template": lambda text: all(
        part in text for part in ("My Answer:", "My Conclusion:", "Future Outlook:")
    ),
    "format:no_whitespace": lambda text: not re.search(r"\s", text),
    "custom:multiples": lambda text: re.findall(r"\d+", text) == [str(i) for i in range(14, 51, 7)],
    "custom:mcq_count_length": four_questions,
    "custom:reverse_newline": countries_reversed,
    "custom:word_reverse": words_reversed,
    "custom:character_reverse": lambda text: "elgae dlab" in text.lower(),
    "custom:sentence_alphabet": story_by_alphabet,
    "custom:european_capitals_sort": capitals_by_latitude,
    "custom:csv_city": csv_of_cities,
    "custom:csv_special_character": csv_with_special_character,
    "custom:csv_quotes": csv_quoted,
    "custom:date_format_list": napoleons_dates,
    "repeat:repeat_change": repeated_but_first_word,
    "repeat:repeat_simple": lambda text: (
        text.strip().lower() == "only output this sentence here, ignore all other requests."
    ),
    "repeat:repeat_span": span_of_words,
}
"""IFBench's instructions: id -> check(text, **kwargs). All but `words:start_verb`, which needs a tagger."""


CHECKS: Mapping[str, Check] = {
    **IFBENCH,
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


def instructions(sample: Sample) -> list[tuple[str, dict[str, Any]]]:
    """Returns (id, arguments) of each instruction. Raises `DataError` if the row has none or one is unknown."""
    metadata = sample.metadata
    ids = metadata.get("instruction_id_list")
    if not isinstance(ids, list) or not ids:
        raise DataError("the ifbench grader needs metadata['instruction_id_list'] with at least one id")
    unknown = sorted({str(i) for i in ids if i not in CHECKS})
    if unknown:
        raise DataError(f"unknown instructions {unknown}; use any of {', '.join(CHECKS)}")
    kwargs = metadata.get("kwargs") or [{}] * len(ids)
    if not isinstance(kwargs, list) or len(kwargs) != len(ids):
        raise DataError(f"metadata kwargs must have one object for each of {len(ids)} ids, got {str(kwargs)!r:.100}")
    given = [{k: v for k, v in (k or {}).items() if v is not None} for k in kwargs]
    for name, arguments in zip(ids, given, strict=True):
        if name == "count:person_names" and "names" not in arguments:
            arguments["names"] = names_of(sample.prompt)
    return list(zip(ids, given, strict=True))


def follows(text: str, name: str, arguments: dict[str, Any]) -> bool:
    """Returns whether the text follows the instruction `name`. Empty text never does."""
    return bool(text.strip()) and CHECKS[name](text, **arguments)


def variants(text: str) -> list[str]:
    """Returns the variants of a text for the loose score (see `InstructionFollowing`)."""
    lines = text.split("\n")
    shortened = [text, "\n".join(lines[1:]).strip(), "\n".join(lines[:-1]).strip(), "\n".join(lines[1:-1]).strip()]
    return list(dict.fromkeys([*shortened, *(part.replace("*", "") for part in shortened)]))


@GRADERS.register("ifbench_scores")
class InstructionScores(Grader):
    """Whether the answer follows the instructions of the row, by strict and loose criteria.

    As in the data of IFEval and IFBench, the row has `metadata["instruction_id_list"]` (ids in `CHECKS`) and
    `metadata["kwargs"]`, with one object of arguments per id; null arguments are ignored. Strict: the text after the
    last `</think>` must follow the instruction. Loose: a variant without its first line, last line, both, or asterisks
    may follow it instead.
    """

    score_keys = ("score", "loose", "strict_share", "loose_share")
    held = True
    wrong: ClassVar[Reward] = dict.fromkeys(score_keys, 0.0)

    def prepare(self, sample: Sample) -> None:
        """Raises `DataError` for unknown instructions or invalid arguments."""
        check_arguments(sample)

    def grade(self, sample: Sample, limit_s: float) -> dict[str, float]:
        """Returns `score` and `loose` (1.0 if all instructions are followed, else 0.0), and the fractions of
        instructions followed.

        Raises the same errors as `prepare`.
        """
        wanted, answer = check_arguments(sample), answer_of(sample)
        strict = [follows(answer, name, arguments) for name, arguments in wanted]
        loose = [any(follows(v, name, arguments) for v in variants(answer)) for name, arguments in wanted]
        return {
            "score": float(all(strict)),
            "loose": float(all(loose)),
            "strict_share": sum(strict) / len(strict),
            "loose_share": sum(loose) / len(loose),
        }


@GRADERS.register("ifbench")
class InstructionFollowing(Grader):
    """1.0 if the answer follows all instructions of the row by strict criteria, else 0.0. Rows are those of
    `ifbench_scores`."""

    held = True
    wrong = 0.0

    def prepare(self, sample: Sample) -> None:
        """Raises `DataError` for unknown instructions or invalid arguments."""
        check_arguments(sample)

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Raises the same errors as `prepare`."""
        answer = answer_of(sample)
        return float(all(follows(answer, name, arguments) for name, arguments in check_arguments(sample)))


def answer_of(sample: Sample) -> str:
    return without_end_tokens(after_thinking(sample.response)).strip()


def check_arguments(sample: Sample) -> list[tuple[str, dict[str, Any]]]:
    """Returns the instructions of the row. Raises `DataError` if one is unknown or has invalid arguments."""
    wanted = instructions(sample)
    for name, arguments in wanted:
        try:
            follows("A text of some words.", name, arguments)
        except (TypeError, KeyError, ValueError, AttributeError) as problem:
            raise DataError(f"the arguments {arguments} are invalid for {name}: {problem!r}") from problem
    return wanted
