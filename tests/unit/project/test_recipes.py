"""The demo's and the toy tasks are what they claim: disjoint, repeatable, exactly scored."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recipes
from recipes.coding_agent.grading import ASK
from recipes.coding_agent.tasks import TASKS, Task
from recipes.demo import task
from recipes.tiny import tasks
from slime.core.sample import Sample
from tests.support.marks import quick


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def demo_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("reasoning_gym")
    return task.write_task(tmp_path_factory.mktemp("demo"), seed=0)


def test_held_out_problems_are_held_out(demo_files: tuple[Path, Path]) -> None:
    train, held_out = ({json.dumps(row["prompt"]) for row in read(path)} for path in demo_files)
    assert len(held_out) == task.NUM_HELD_OUT >= 200
    assert len(train) == len(read(demo_files[0])) >= task.MIN_TRAIN, "a question repeats, or a run would repeat prompts"
    assert not train & held_out
    asked = [
        {tuple(sorted(re.findall(r"\d+", row["prompt"][0]["content"]))) for row in read(path)}  # type: ignore[index]
        for path in demo_files
    ]
    assert not asked[0] & asked[1], "a held-out sum is trained on with its terms swapped or in another phrasing"


def test_the_same_seed_gives_the_same_files(demo_files: tuple[Path, Path], tmp_path: Path) -> None:
    again = task.write_task(tmp_path, seed=0)
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in demo_files]


def test_an_answer_is_right_or_wrong_and_nothing_between(demo_files: tuple[Path, Path]) -> None:
    from reasoning_gym import get_score_answer_fn

    score = get_score_answer_fn(task.SCORER)
    for row in read(demo_files[1]):
        entry = row["metadata"]["reasoning_gym"]["entry"]  # type: ignore[index]
        label = str(row["label"])
        assert score(label, entry) == 1.0
        others = (f"1{label}", f"{label}0", f"{label}7", f"-{label}1")
        assert all(score(other, entry) == 0.0 for other in others if int(other) != int(label))
        assert score("", entry) == 0.0


def test_digits_reward_is_dense() -> None:
    assert [tasks.digit_fraction(None, Sample(response=r)) for r in ("", "ab", "a1", "12")] == [0, 0, 0.5, 1]


def test_cold_start_and_reinforcement_ask_the_same_sums() -> None:
    taught = {m[0]["content"]: m[1]["content"] for m in (r["messages"] for r in tasks.sums_sft_rows(100))}
    asked = {r["prompt"][0]["content"]: r["label"] for r in tasks.sums_rl_rows(100)}
    assert taught == asked and len(taught) == 25
    assert all(str(eval(q.rstrip("="))) == a for q, a in taught.items())


def hidden_results(folder: Path, task: Task, files: dict[str, str]) -> tuple[set[bool], set[bool]]:
    """Which results `fixes` and `keeps` have on these files."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)

    def returns(arguments: list[object], expected: object) -> bool:
        call = json.dumps({"function": task.function, "arguments": arguments})
        done = subprocess.run([sys.executable, "-c", ASK, call], cwd=folder, capture_output=True, text=True)
        return bool(json.loads(done.stdout.splitlines()[-1]) == expected)

    return {returns(*call) for call in task.fixes}, {returns(*call) for call in task.keeps}


@pytest.mark.parametrize("coding", quick(TASKS, TASKS[0]), ids=lambda task: task.function)
def test_a_coding_task_is_broken_and_its_answer_is_not(coding: Task, tmp_path: Path) -> None:
    assert hidden_results(tmp_path, coding, coding.files) in (({False}, {True}), ({False}, set()))
    tests = [sys.executable, "-B", "-m", "unittest", "-q"]
    assert subprocess.run(tests, cwd=tmp_path, capture_output=True).returncode != 0
    answered = {**coding.files, coding.path: coding.answer}
    assert hidden_results(tmp_path / "answered", coding, answered) in (({True}, {True}), ({True}, set()))
    assert subprocess.run(tests, cwd=tmp_path / "answered", capture_output=True).returncode == 0
    assert not [call for call in coding.shown if call in (*coding.fixes, *coding.keeps)], "an answer could be copied"


def test_the_hooks_of_recipes_and_examples_satisfy_their_contracts() -> None:
    from slime.settings.hook_contracts import load_hook

    assert load_hook("examples.second_try:generate", "generate")
    assert load_hook("recipes.tiny.tasks:digit_fraction", "custom_rm")
    assert load_hook("recipes.coding_agent.generate:generate", "generate")
    by_turn = load_hook("recipes.game.play:generate_by_turn", "generate")
    assert (
        by_turn
        and load_hook("recipes.game.play:generate", "generate")
        and load_hook("recipes.game.play:log_eval", "eval_log")
    )


def test_no_game_that_begins_with_a_wrong_answer_is_worth_more_than_one_solved_at_once() -> None:
    from recipes.game.play import TURNS, hint, nearness

    assert [nearness(guess, "8") for guess in ("7", "9", "12", "", "nan", "inf")] == [0.25, 0.25, 0.1, 0.0, 0.0, 0.0]
    assert "less" in hint("9", "8") and "more" in hint("7", "8") and "no number" in hint("nan", "8")
    gamma, best = 0.5, 1.0
    for _ in range(TURNS - 1):
        best = max(nearness("7", "8"), nearness("7", "8") + gamma * best)
        assert best < 1.0


@pytest.mark.parametrize(("speedup", "flag"), [(0.2, "--no-bf16"), (1.3, "--no-bf16"), (8.0, "--bf16")])
def test_a_cpu_takes_bfloat16_only_if_it_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, speedup: float, flag: str
) -> None:
    monkeypatch.setattr(recipes, "products_per_s", lambda dtype, shape: 10 * (speedup if dtype == "bfloat16" else 1))
    assert recipes.dtype_flag() == flag
    monkeypatch.undo()
    assert recipes.products_per_s("float32", (2, 3, 4), 0.0) > 0


def started(recipe: str, folder: Path, **environment: str) -> str:
    """What a recipe's script prints, with a Python that prints its arguments; the run's report exists already."""
    python = folder / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    (folder / "report.md").write_text("the summary")
    env = {**os.environ, "PY": str(python), "RUN_DIR": str(folder), **environment}
    script = Path(recipes.__file__).parent / recipe / "run.sh"
    return subprocess.run(["bash", str(script)], env=env, check=True, capture_output=True, text=True).stdout


def test_coding_agents_with_other_tasks_have_datasets_of_their_own(tmp_path: Path) -> None:
    """Law: a run never trains on the tasks that another run has prepared meanwhile."""
    names = []
    for data, harness in (("", "small_agent"), ("shop.jsonl", "small_agent"), ("shop.jsonl", "codex")):
        prepared, trained = started("coding_agent", tmp_path, DATA=data, HARNESS=harness).splitlines()
        (name,) = re.findall(r"--out (\S+)", prepared)
        assert f"--prompt-data {name} " in trained
        names.append(Path(name).name)
    assert names == ["train-small_agent.jsonl", "shop-small_agent.jsonl", "shop-codex.jsonl"]


@pytest.mark.parametrize("recipe", ["demo", "game", "lora", "coding_agent"])
def test_the_summary_of_a_run_is_printed_by_the_run_alone(recipe: str, tmp_path: Path) -> None:
    assert "the summary" not in started(recipe, tmp_path)


@pytest.mark.slow
def test_the_packed_model_unpacks_and_answers(tmp_path: Path) -> None:
    from recipes.demo.model import PROBE, PROBE_ANSWER, ask, unpack

    out = unpack(tmp_path / "model")
    assert PROBE_ANSWER in ask(out, PROBE)
    config, generation = (json.loads((out / f"{n}.json").read_text()) for n in ("config", "generation_config"))
    assert config["tie_word_embeddings"] is True and generation["eos_token_id"] == [2, 0]
    assert unpack(out) == out
