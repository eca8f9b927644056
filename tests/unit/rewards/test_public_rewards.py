"""Rewards that published graders gave (benchmarks/peers/graders.py): ours are the same, or differ where a page says so.

The public slime's `gpqa` has no counterpart that others publish; its cases are ours.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rewards.graders import make_grader
from slime.rewards.graders.answers import boxed_equals, dapo_score, deepscaler_reward, last_boxed
from slime.rewards.graders.instructions import CAPITALS
from tests.support.documents import ROOT
from tests.support.reward_cases import ANSWERS, INSTRUCTIONS

MEASURED: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "public_rewards.json").read_text())
DIFFERENT: dict[tuple[str, str], Any] = {
    ("math", "\\boxed{1 million}"): 1.0,
    ("math", "\\boxed{\\frac{2}{4}}"): 1.0,
    ("math", "\\boxed{2+2}"): 1.0,
    ("dapo", "Answer: 0.5"): [1.0, True, "0.5"],
    ("dapo", "Answer: 42<|im_end|>"): [1.0, True, "42"],
    ("dapo", "Answer: 42<|im_end|>\n"): [1.0, True, "42"],
    ("f1", "so \\boxed{Paris}"): 1.0,
}
"""Answers with another reward than the published one, and ours. Each has a row in docs/migration.md."""
DIFFERENT_INSTRUCTIONS = {
    ("count:conjunctions", "and And and"): False,
    ("ratio:sentence_words", "One fox. Two fox. Six fox."): False,
    ("words:paragraph_last_first", "Well, it went well.\n\nNo no"): True,
    ("repeat:repeat_span", "a poem"): True,
}
CHOICES = ["3 J", "4 J", "5 J", "6 J"]


def page_section() -> str:
    page = (ROOT / "docs" / "migration.md").read_text()
    return page.partition("### Rewards")[2].partition("### Plugins")[0]


def reward_of(grader: str, response: str, label: Any, **metadata: Any) -> Any:
    made = make_grader(grader)
    sample = Sample(index=1, response=response, label=label, metadata=metadata)
    made.prepare(sample)
    reward = made.grade(sample, 30.0)
    return [reward["score"], reward["acc"], reward["pred"]] if isinstance(reward, dict) else reward


@pytest.mark.parametrize(("grader", "response", "label", "published"), MEASURED["answers"])
def test_an_answer_has_the_published_reward(grader: str, response: str, label: str, published: Any) -> None:
    ours = reward_of(grader, response, label)
    if (grader, response) not in DIFFERENT:
        assert ours == pytest.approx(published) if isinstance(ours, float) else ours == published
        return
    assert ours == DIFFERENT[grader, response] != published
    written = response.strip().replace("|", "\\|").partition("\\boxed")
    assert "".join(written[1:] if grader == "math" else written) in page_section()


@pytest.mark.parametrize(("name", "text", "published"), MEASURED["instructions"])
def test_an_instruction_has_the_published_verdict(name: str, text: str, published: list[bool | None]) -> None:
    """Each package of IFBench gave a verdict, or does not have the instruction."""
    ours = next(text == good for this, _, *both in INSTRUCTIONS for good in both[:1] if this == name)
    if (name, text) in DIFFERENT_INSTRUCTIONS:
        assert ours == DIFFERENT_INSTRUCTIONS[name, text] and (not ours) in published
        assert f"`{name}`" in page_section()
    else:
        assert set(published) <= {ours, None}


def test_what_was_measured_is_what_the_page_reports() -> None:
    texts = [[name, text] for name, _, *both in INSTRUCTIONS for text in both]
    assert [case[:-1] for case in MEASURED["answers"]] == [list(case) for case in ANSWERS]
    assert [case[:-1] for case in MEASURED["instructions"]] == texts
    agreed, pairs = MEASURED["samples"]["own instructions"]
    page = " ".join(page_section().split())
    assert f"{agreed} of {pairs}" in page
    assert f"{len(ANSWERS)} answers" in page and f"{len(texts)} texts" in page
    assert all(f"{name} {MEASURED['packages'][name]}" in page for name in ("verl", "dspy", "nvidia-ifbench"))


GPQA: list[tuple[str, Any, dict[str, Any], float]] = [
    ("The answer is C", "C", {}, 1.0),
    ("Answer: (C)", "C", {}, 1.0),
    ("C is correct", "C", {}, 1.0),
    ("Considering A and B, I pick C", "C", {}, 1.0),
    ("It must be (C).", "C", {}, 1.0),
    ("C<|im_end|>", "C", {}, 1.0),
    ("<think>The answer is A</think>The answer is C", "C", {}, 1.0),
    ("The answer is B", "C", {}, 0.0),
    ("The answer is B or C", "C", {}, 0.0),
    ("C is wrong", "C", {}, 0.0),
    ("The answer is C", 2, {}, 1.0),
    ("The answer is C", "5 J", {"choices": CHOICES}, 1.0),
    ("The answer is C", "5 J", {"correct_letter": "C"}, 1.0),
    ("The answer is C", "5 J", {"choices": CHOICES, "correct_letter": "D"}, 0.0),
    ("The answer is C", None, {"correct_letter": "c"}, 1.0),
    ("The answer is J", "J", {"valid_letters": ["C", "J"]}, 1.0),
    ("The answer is D", "J", {"valid_letters": ["C", "J"]}, 0.0),
    ("so it takes 5 J.", "C", {"choices": CHOICES}, 1.0),
    ("so it takes 4 J.", "C", {"choices": CHOICES}, 0.0),
    ("so it takes 15 Jules.", "C", {"choices": CHOICES}, 0.0),
    ("3 J, 4 J, 5 J, 6 J", "C", {"choices": CHOICES}, 0.0),
    ("It is Paris.", "Paris", {}, 1.0),
    ("5 J", "C", {"choices": {"A": "3 J", "B": "4 J", "C": "5 J"}}, 1.0),
    ("", "C", {}, 0.0),
]


@pytest.mark.parametrize(("response", "label", "metadata", "reward"), GPQA)
def test_a_choice_is_named_by_letter_or_text(
    response: str, label: Any, metadata: dict[str, Any], reward: float
) -> None:
    assert reward_of("gpqa", response, label, **metadata) == reward


def test_the_prefix_grades_the_box_alone() -> None:
    assert reward_of("boxed_f1", "so \\boxed{Paris}", "Paris") == 1.0 and reward_of("boxed_f1", "Paris", "Paris") == 0.0


def test_labels_may_be_numbers() -> None:
    assert reward_of("math", "\\boxed{42}", 42) == reward_of("deepscaler", "</think>\\boxed{42}", 42) == 1.0


def test_the_list_of_names_is_the_prompts() -> None:
    def score(prompt: Any) -> Any:
        metadata = {"instruction_id_list": ["count:person_names"], "kwargs": [{"N": 2}]}
        sample = Sample(prompt=prompt, response="Emma met Leo.", metadata=metadata)
        return make_grader("ifbench").grade(sample, 30.0)

    asked = "Mention at least 2 of this list of person names: Zoe, Leo, Emma."
    assert score(asked) == score([{"role": "user", "content": asked}]) == 1.0
    assert score(asked.replace("Leo", "Tom")) == 0.0
    with pytest.raises(DataError, match="list of person names"):
        score("Mention names.")


def test_kyiv_is_a_capital_that_may_be_left_out() -> None:
    cities, metadata = list(CAPITALS), {"instruction_id_list": ["custom:european_capitals_sort"]}
    assert cities == sorted(cities, key=lambda city: -CAPITALS[city])
    for named in (cities, [city for city in cities if city != "Kyiv"]):
        assert reward_of("ifbench", ", ".join(named), None, **metadata) == 1.0


def test_functions_of_the_public_graders_take_what_they_take() -> None:
    assert dapo_score("so \\boxed{42}", "42", strict_box_verify=True) == {"score": 1.0, "acc": True, "pred": "42"}
    assert dapo_score("Answer: 42", "42", strict_box_verify=True) == {"score": -1.0, "acc": False, "pred": None}
    assert dapo_score("\\boxed{42}" + "x" * 100, "42", True)["pred"] is None
    assert deepscaler_reward("</think> \\boxed{4}", "") == 0.0 and not boxed_equals("\\boxed{4}", "")
    assert boxed_equals("\\boxed{4}", 4) and not boxed_equals("4", "4") and not boxed_equals("\\boxed{4}", None)
    assert last_boxed("4") is None and last_boxed("\\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
