"""The built-in graders: right answers score, wrong ones and cheats do not."""

from __future__ import annotations

from typing import Any

import pytest

from slime.core.errors import ConfigError, DataError
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, make_grader
from slime.rewards.graders.answers import last_boxed
from slime.rewards.scores import Scored, Unscored, check_reward, reason_kind

LIMIT_S = 30.0


def grade(rm_type: str, response: str, label: Any = None, **metadata: Any) -> Any:
    return make_grader(rm_type).grade(Sample(index=1, response=response, label=label, metadata=metadata), LIMIT_S)


@pytest.mark.parametrize("name", GRADERS.names())
def test_every_name_loads(name: str) -> None:
    assert make_grader(name).name == name


WRONG: dict[str, dict[str, Any]] = {
    "code": {"tests": ["assert f(1) == 2"]},
    "gpqa": {"label": "C"},
    "ifbench": {"instruction_id_list": ["punctuation:no_comma"], "response": "a, b"},
    "ifbench_scores": {"instruction_id_list": ["punctuation:no_comma"], "response": "a, b"},
    "reasoning_gym": {"source_dataset": "basic_arithmetic", "answer": "-4"},
}


@pytest.mark.parametrize("name", GRADERS.names())
def test_what_computes_says_what_a_wrong_answer_gets(name: str) -> None:
    """Law: an answer that its grader cannot deal with has no more than a wrong one; who waits for others says none."""
    kind = GRADERS.get(name)
    if kind.waits or kind.needs_network:
        assert kind.wrong is None
        return
    wrong = grade(name, **{"response": "no", "label": "7"} | WRONG.get(name, {}))
    assert kind.wrong is not None and check_reward(kind.wrong) == Scored(kind.wrong)
    if isinstance(kind.wrong, dict):
        assert {**wrong, "pred": ""} == {**kind.wrong, "pred": ""}
        assert set(kind.score_keys) <= set(kind.wrong)
    elif name != "random":
        assert wrong == kind.wrong


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="exact_match"):
        make_grader("maths")


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("so \\boxed{1/3}", "0.5", 0.0),
        ("first \\boxed{4}, then \\boxed{5}", "4", 0.0),
        ("The answer is $12$.", "12", 0.0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("", "4", 0.0),
        ("\\boxed{}", "4", 0.0),
        ("\\boxed{" + " ".join(str(i) for i in range(1000)) + "}", "4", 0.0),
    ],
)
def test_mathematics(response: str, label: str, score: float) -> None:
    assert grade("math", response, label) == score


def test_a_reference_that_cannot_be_read_is_an_error_not_a_zero() -> None:
    with pytest.raises(DataError):
        grade("math", "\\boxed{4}", None)


def test_last_boxed_balances_braces() -> None:
    assert last_boxed("a \\boxed{1} b \\boxed{\\frac{1}{2}} c \\boxed{open") == "\\frac{1}{2}"
    assert last_boxed("none") is None
    assert last_boxed("\\boxed{" * 20_000) is None


def test_exact_match() -> None:
    assert grade("exact_match", " 7\n", 7) == 1.0
    assert grade("exact_match", "I say <answer>7</answer>", "7") == 1.0
    assert grade("exact_match", "77", "7") == 0.0
    assert grade("boxed_exact_match", "7 \\boxed{8}", "8") == 1.0
    assert grade("boxed_exact_match", "8", "8") == 0.0


def test_reasoning_gym_uses_the_tasks_own_verifier() -> None:
    entry = {"question": "Calculate 5 - 3 - 6.", "answer": "-4", "metadata": {"source_dataset": "basic_arithmetic"}}
    for metadata in (
        {"reasoning_gym": {"dataset": "basic_arithmetic", "entry": entry}},
        {"source_dataset": "basic_arithmetic", "entry": entry},
        {"source_dataset": "basic_arithmetic", **entry},
    ):
        assert grade("reasoning_gym", "5 - 3 - 6 = -4", **metadata) == 1.0
        assert grade("reasoning_gym", "it is 4", **metadata) == 0.0
        assert grade("reasoning_gym", "", **metadata) == 0.0
    with pytest.raises(DataError, match="source_dataset"):
        grade("reasoning_gym", "4")


def test_f1_dapo_deepscaler() -> None:
    assert grade("f1", "The Eiffel tower", "eiffel tower") == 1.0
    assert grade("f1", "a b", "b c") == pytest.approx(2 / 3)
    assert grade("dapo", "Answer: 4", "4") == {"score": 1.0, "acc": 1.0, "pred": "4"}
    assert grade("dapo", "no", "4")["score"] == -1.0
    assert grade("deepscaler", "<think>\\boxed{4}</think> \\boxed{5}", "5") == 1.0
    assert grade("deepscaler", "<think>\\boxed{5}", "5") == 0.0


def test_random_is_a_repeatable_coin() -> None:
    scores = [grade("random", f"response {i}") for i in range(64)]
    assert set(scores) == {0.0, 1.0} and scores == [grade("random", f"response {i}") for i in range(64)]


@pytest.mark.parametrize(
    "value", [None, float("nan"), float("inf"), "1", [1.0], {}, {"a": float("nan")}, {1: 2.0}, 10**400]
)
def test_what_is_no_score_is_a_reason(value: Any) -> None:
    assert isinstance(check_reward(value), Unscored)


def test_what_is_a_score() -> None:
    assert check_reward(True) == Scored(1.0)
    assert check_reward(2) == Scored(2.0)
    assert check_reward({"score": -1.0, "pred": "x"}) == Scored({"score": -1.0, "pred": "x"})


def test_reasons_become_metric_names() -> None:
    assert reason_kind("timeout after 30 s") == "timeout_after_s"
    assert reason_kind("") == "unknown"
