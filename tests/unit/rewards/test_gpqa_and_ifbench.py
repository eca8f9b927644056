"""Letters and instructions: right spellings score, wrong ones and cheats do not, rows that say nothing are errors."""

from __future__ import annotations

import time
from typing import Any

import pytest

from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rewards.graders import make_grader
from slime.rewards.graders.instructions import CHECKS, IFBENCH, num_sentences
from tests.support.reward_cases import INSTRUCTIONS

LIMIT_S = 30.0
JOULES = ["3 J", "4 J", "5 J", "6 J"]


def letter(response: str, label: Any = "C", **metadata: Any) -> Any:
    return make_grader("gpqa").grade(Sample(response=response, label=label, metadata=metadata), LIMIT_S)


@pytest.mark.parametrize(
    "response",
    [
        "The answer is C",
        "The correct answer is (C).",
        "Answer: C",
        "**Answer:** C",
        "**Answer: (C)**",
        "ANSWER: c",
        "Final answer: $\\boxed{C}$",
        "\\boxed{\\text{C}}",
        "\\boxed{\\textbf{(C)}}",
        "\\boxed{C. 5 J}",
        "\\boxed{The answer is C}",
        "<answer>C</answer>",
        "<answer>(c)</answer>",
        "so\nC",
        "so\n(C)",
        "so\n**C**",
        "so\nC) because",
        "The answer is option C because of x",
        "the answer is: C",
        "The answer is \uff23.",
        "<think>The answer is A</think> Answer: C",
        "Answer: A ... no, wait. Answer: C",
        "The answer is \\(C\\).",
        "The correct option is C, since A and B fail",
        "The best choice is therefore C.",
        "The answer is **C**: 5 J",
        "I think the answer should be C",
        "The correct answer is:\n\nC",
        "Answer: \n**C**",
        "My answer is c.",
    ],
)
def test_a_letter_is_found_in_many_spellings(response: str) -> None:
    assert letter(response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "The answer is A",
        "C is wrong",
        "The answer is not C",
        "The answer is C or D",
        "\\boxed{C, D}",
        "Answer: C/A",
        "",
        "The answer is Carbon",
        "\\boxed{ABCD}",
        "\\boxed{C}\\boxed{A}",
        "The answer is a C compound",
        " C A " * 9,
        "<think>Answer: C</think>",
        "Answer: C. Answer: \\boxed{D}",
    ],
)
def test_what_is_no_commitment_to_the_letter_scores_nothing(response: str) -> None:
    assert letter(response) == 0.0


def test_labels_name_a_choice_by_letter_number_or_text() -> None:
    for label in ("C", "(C)", "C.", 2, "2", "5 J", "c"):
        assert letter("Answer: C", label, choices=JOULES) == 1.0, label
        assert letter("\\boxed{5 J}", label, choices=JOULES) == 1.0, label
    assert letter("Answer: J", "J", choices=[str(i) for i in range(100, 110)]) == 1.0
    assert letter("The answer is A matter of taste", "A") == 0.0
    for label in (None, "", "E", 7):
        with pytest.raises(DataError, match="gpqa"):
            letter("Answer: C", label, choices=JOULES)


@pytest.mark.parametrize("attack", ["\\boxed{", "Answer: ", "(", "<answer>", "\\text{", "*", "answer is option "])
def test_hostile_text_costs_little_time(attack: str) -> None:
    started = time.process_time()
    assert letter(attack * 20_000) == 0.0
    assert make_grader("ifbench").grade(every_instruction(attack * 20_000), LIMIT_S) == 0.0
    assert time.process_time() - started < 5.0


def every_instruction(response: str) -> Sample:
    ids, kwargs = [case[0] for case in INSTRUCTIONS], [case[1] for case in INSTRUCTIONS]
    return Sample(response=response, metadata={"instruction_id_list": ids, "kwargs": kwargs})


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), INSTRUCTIONS, ids=[case[0] for case in INSTRUCTIONS])
def test_an_instruction_is_followed_or_not(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    def score(response: str) -> Any:
        metadata = {"instruction_id_list": [name], "kwargs": [{**arguments, "unused": None}]}
        result: Any = make_grader("ifbench").grade(Sample(response=response, metadata=metadata), LIMIT_S)
        return result

    assert score(good) == 1.0 and score(f"<think>{bad}</think>{good}") == 1.0
    assert score(bad) == 0.0 and score("") == 0.0


def test_every_check_has_a_case() -> None:
    assert {case[0] for case in INSTRUCTIONS} == set(CHECKS) and len(IFBENCH) == 57


def test_loose_forgives_what_stands_around_the_answer() -> None:
    sample = Sample(
        response="Sure, here you are:\n**all small**",
        metadata={
            "instruction_id_list": ["change_case:english_lowercase", "punctuation:no_comma", "startend:quotation"],
        },
    )
    result = make_grader("ifbench_scores").grade(sample, LIMIT_S)
    assert result == {"score": 0.0, "loose": 0.0, "strict_share": 0.0, "loose_share": pytest.approx(2 / 3)}


def test_sentences_end_with_their_marks() -> None:
    for text, count in (
        ("One. Two! Three?", 3),
        ("Dr. J. Smith paid 3.5 dollars, e.g. twice.", 1),
        ("No mark", 1),
        ("...", 0),
        ("1. First.\n2. Second.", 2),
        ("他来了。她走了。", 2),
        ('Wait... what?! "Yes." He left.', 4),
        ("", 0),
    ):
        assert num_sentences(text) == count, text


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"instruction_id_list": []},
        {"instruction_id_list": ["language:response_language"]},
        {"instruction_id_list": ["words:start_verb"]},
        {"instruction_id_list": ["count:numbers"], "kwargs": [{}]},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]},
        {"instruction_id_list": ["keywords:existence"], "kwargs": [{"words": ["a"]}]},
        {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": 1, "relation": "near"}]},
    ],
)
def test_a_row_that_cannot_be_checked_is_an_error_not_a_zero(metadata: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        make_grader("ifbench").grade(Sample(response="x", metadata=metadata), LIMIT_S)
