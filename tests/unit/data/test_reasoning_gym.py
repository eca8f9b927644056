"""Tasks of reasoning-gym by name: the same rows everywhere, and no question on both sides of the split."""

from __future__ import annotations

import json

import pytest

from slime.core.errors import ConfigError
from slime.core.sample import Sample
from slime.data.dataset import PromptDataset
from slime.data.reasoning_gym_rows import is_held_out, rows
from slime.data.row_files import read_rows
from slime.data.schemes.reasoning_gym import Task, parse
from slime.rewards.graders import make_grader
from slime.settings.data_files import count_rows
from tests.support.marks import quick


def made(task: str, split: str, size: int = 100, seed: int = 0, **settings: object) -> list[dict]:
    request = {"task": task, "size": size, "seed": seed, "split": split, "system": None, "settings": settings}
    return json.loads(json.dumps(list(rows(request))))


def test_a_name_says_size_seed_split_and_the_settings_of_the_task() -> None:
    assert parse("spell_backward") == Task("spell_backward")
    name = 'chain_sum?size=7&seed=3&split=eval&system=direct&min_terms=4&operators=["%2B","-"]&allow_negation=true'
    settings = {"min_terms": 4, "operators": ["+", "-"], "allow_negation": True}
    assert parse(name) == Task("chain_sum", 7, 3, "eval", "direct", settings)
    assert count_rows(f"rg:{name}") == 7 and count_rows(f"rg:{name}@[2:5]") == 3
    for wrong in ("t?size=0", "t?size=x", "t?size", "t?seed=-1", "t?split=test", "t?a=1&a=2", "t?size=true"):
        with pytest.raises(ConfigError, match=r"^rg:t"):
            parse(wrong)


@pytest.mark.parametrize(
    "task", quick(["spell_backward", "chain_sum", "letter_counting", "course_schedule"], "chain_sum")
)
def test_what_is_trained_and_what_is_held_out_share_no_question(task: str) -> None:
    """Whatever size and seed: the side of a question is decided by its text."""
    trained = [{row["input"] for row in made(task, "train", seed=seed)} for seed in (0, 1, 2)]
    held_out = [{row["input"] for row in made(task, "eval", size=60, seed=seed)} for seed in (0, 1, 7)]
    assert all(len(questions) > 20 for questions in (*trained, *held_out))
    assert not set().union(*trained) & set().union(*held_out)
    every = made(task, "all", size=200)
    assert {is_held_out(row["input"]) for row in every} == {True, False}


def test_a_seed_is_a_data_set_and_a_setting_makes_another() -> None:
    assert made("chain_sum", "train", size=20) == made("chain_sum", "train", size=20)
    assert made("chain_sum", "train", size=20) != made("chain_sum", "train", size=20, seed=1)
    longest = max(len(row["input"]) for row in made("spell_backward", "train", size=50, max_word_len=4))
    assert longest < max(len(row["input"]) for row in made("spell_backward", "train", size=50, min_word_len=9))


@pytest.mark.parametrize(
    ("task", "settings", "says"),
    [
        ("spell_bakward", {}, "no task .*spell_backward"),
        ("spell_backward", {"min_len": 3}, "did you mean min_word_len"),
        ("spell_backward", {"min_word_len": 9, "max_word_len": 3}, "AssertionError: max_word_len must be >="),
        ("course_schedule", {"min_num_courses": "two"}, "TypeError"),
    ],
)
def test_a_task_that_cannot_be_made_is_refused_with_its_own_words(task: str, settings: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        made(task, "train", **settings)


def test_a_task_with_too_few_questions_says_so() -> None:
    (row,) = made("count_bits", "all", size=1, min_n=7, max_n=7)
    nowhere = "train" if is_held_out(row["input"]) else "eval"
    with pytest.raises(ConfigError, match=rf"only 0 of \d+ generated entries are in split {nowhere}"):
        made("count_bits", nowhere, size=2, min_n=7, max_n=7)


@pytest.mark.parametrize(
    "task", quick(["spell_backward", "chain_sum", "arc_agi", "word_ladder", "ransom_note"], "word_ladder")
)
def test_the_tasks_verifier_gives_its_own_answer_full_marks(task: str) -> None:
    grader = make_grader("reasoning_gym")
    for row in made(task, "train", size=4):
        answer = f"Let me see.\n<answer>{row['label']}</answer>"
        sample = Sample(prompt=row["input"], label=row["label"], metadata=row["metadata"], response=answer)
        assert grader.grade(sample, 10.0) == 1.0
        sample.response = "<answer>no idea</answer>"
        assert grader.grade(sample, 10.0) != 1.0


@pytest.mark.slow
def test_rows_are_the_same_in_every_process_and_keep_their_own_column_names(monkeypatch) -> None:
    """`ransom_note` orders letters by Python's hashing, which is another one in each process."""
    name = "rg:ransom_note?size=6&seed=2"
    monkeypatch.setenv("PYTHONHASHSEED", "77")
    own = [row.value for row in read_rows(name)]
    data = PromptDataset.load(f"{name}@[1:4]", input_key="question_of_another_file", label_key=None)
    assert [data[i].prompt for i in range(3)] == [row["input"] for row in own[1:4] if row]
    assert data[0].label is not None and data[0].source == f"{name}:2"


def test_held_out_rows_of_a_system_prompt_are_messages() -> None:
    trained = {row["input"] for row in made("spell_backward", "train", size=50)}
    rows_of_child = list(read_rows("rg:spell_backward?size=9&system=simple", held_out=True))
    for row in rows_of_child:
        assert row.value and [message["role"] for message in row.value["input"]] == ["system", "user"]
        assert is_held_out(row.value["input"][1]["content"]) and row.value["input"][1]["content"] not in trained
