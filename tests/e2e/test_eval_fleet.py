"""Evaluations on engines of their own, while training and generation go on: their scores are those of evaluations that
training waits for, they never mix versions, and training is as without them.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.tiny.tasks import DIGITS_FILE
from slime.observability.sinks import read_jsonl
from slime.observability.spans import read_trace
from tests.support.e2e import PROMPTS_PER_STEP, Flags, RealRun, started_and_finished
from tests.support.eval_fleet import BEGUN, after_the_next_step, never_ends
from tests.support.faults import SERVER, hit, victim_of
from tests.support.ledger import require_balance

pytestmark = pytest.mark.slow

STEPS, EVAL_EVERY, BOUND = 5, 2, 4
EVALUATED = [-1, 1, 3, 4]
"""Steps after which an evaluation is due."""
SCORES = ("eval/held", "eval/held/response_len/mean", "eval/held-truncated_ratio", "eval/held-num_scored")
LOOPS = {
    "in step": ("train.py", ["--update-weight-transport", "distributed"]),
    "fully async": ("train_async.py", ["--fully-async", "--max-weight-staleness", str(BOUND)]),
}


def flags_of(tasks: Path, digits: Callable[[Path], Flags], model: Path, folder: Path, function: Any) -> Flags:
    """Small steps, each of which changes the weights visibly, and greedy evaluations with a generate function."""
    config = folder / "eval.yaml"
    path = f"{function.__module__}:{function.__name__}"
    config.write_text(
        "eval:\n  datasets:\n"
        f"    - {{name: held, path: '{tasks / DIGITS_FILE}@[0:16]', temperature: 0,"
        f" custom_generate_function_path: '{path}'}}\n"
    )
    held: Flags = ["--eval-config", config, "--eval-interval", str(EVAL_EVERY), "--eval-fleet", "1"]
    learning: Flags = ["--lr", "2e-2", "--lr-decay-style", "constant", "--num-rollout", str(STEPS)]
    return [*digits(model), *learning, *held, "--n-samples-per-prompt", "4"]


def evaluations(run: RealRun) -> dict[int, dict[str, float]]:
    """Step -> metrics of the evaluation after it."""
    return {int(row["eval/step"]): row for row in read_jsonl(run.run_dir / "metrics.jsonl") if "eval/step" in row}


@pytest.fixture(scope="module", params=LOOPS)
def run_and_flags(
    request: pytest.FixtureRequest, runs: Path, tasks: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> tuple[RealRun, Flags, Path]:
    """A run with an evaluation fleet, the flags of its task, and its checkpoints."""
    script, how = LOOPS[request.param]
    folder = runs / f"eval-fleet-{request.param.replace(' ', '-')}"
    folder.mkdir()
    task, save = flags_of(tasks, digits, tiny_qwen3, folder, after_the_next_step), folder / "save"
    saving: Flags = ["--save", save, "--save-interval", "1"]
    return started_and_finished(folder / "run", [*task, *how, *saving], script=script), task, save


def test_evaluations_belong_to_the_step_whose_weights_they_used(run_and_flags: tuple[RealRun, Flags, Path]) -> None:
    """Law: each due evaluation is logged once, under its step, with the one version of that step, in order."""
    run, *_ = run_and_flags
    found = evaluations(run)
    assert list(found) == EVALUATED, found
    assert [row["eval/weight_version"] for row in found.values()] == [step + 2 for step in EVALUATED]
    assert all(row["eval/num_failed_evaluations"] == 0 and row["eval/held-num_scored"] == 16 for row in found.values())


def test_training_is_as_without_a_fleet(run_and_flags: tuple[RealRun, Flags, Path]) -> None:
    """Law: all steps are trained on full batches of the versions that the loop allows, and the ledger balances."""
    run, *_ = run_and_flags
    rows = run.metrics("train")
    require_balance(rows)
    assert {step: row["data/trained"] for step, row in rows.items()} == {
        step: (step + 1) * PROMPTS_PER_STEP for step in range(STEPS)
    }
    bound = BOUND if json.loads((run.run_dir / "args.json").read_text())["fully_async"] else 0
    for step, row in run.metrics("rollout").items():
        oldest, newest = row["rollout/weight_version/min"], row["rollout/weight_version/max"]
        assert step + 1 - bound <= oldest <= newest <= step + 1, (step, row)
    assert run.left() == []


def test_evaluations_and_training_overlap(run_and_flags: tuple[RealRun, Flags, Path]) -> None:
    """Law: the trace shows a training step inside each evaluation but the last. (Without overlap, the evaluations of
    these runs would never end.)"""
    run, *_ = run_and_flags
    (trace,) = (run.run_dir / "traces").glob("driver-*.json")
    spans = [event for event in read_trace(trace) if event["ph"] == "X"]
    of_eval = {s["args"]["rollout_id"]: (s["ts"], s["ts"] + s["dur"]) for s in spans if s["name"] == "evaluation"}
    trained = [(s["ts"], s["ts"] + s["dur"]) for s in spans if s["name"] == "train"]
    assert sorted(of_eval) == EVALUATED
    for step in EVALUATED[:-1]:
        begin, end = of_eval[step]
        assert any(begin <= at and until <= end for at, until in trained), (step, of_eval[step], trained)


def test_scores_are_those_of_a_blocking_evaluation(run_and_flags: tuple[RealRun, Flags, Path], tasks: Path) -> None:
    """Law: a run that only evaluates the checkpoint of the same step, without a fleet, finds the same (greedily)."""
    run, task, save = run_and_flags
    step = EVALUATED[1]
    alone: Flags = ["--load", save, "--ckpt-step", str(step), "--num-rollout", "0"]
    held: Flags = ["--eval-prompt-data", "held", f"{tasks / DIGITS_FILE}@[0:16]", "--eval-temperature", "0"]
    blocking = started_and_finished(run.run_dir.with_name(f"blocking-{step}"), [*without_fleet(task), *held, *alone])
    (row,) = evaluations(blocking).values()
    assert {name: row[name] for name in SCORES} == {name: evaluations(run)[step][name] for name in SCORES}


def without_fleet(task: Flags) -> Flags:
    """The flags of a task without its evaluations."""
    dropped = ("--eval-config", "--eval-interval", "--eval-fleet")
    return [word for before, word in zip(["", *task], task, strict=False) if {before, word}.isdisjoint(dropped)]


def test_a_lost_fleet_costs_an_evaluation_and_not_the_run(
    tmp_path: Path, tasks: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> None:
    """Law: if the only engine of the fleet dies in an evaluation, this evaluation is counted as failed under its step,
    training goes on to the end, and the ledger balances."""
    flags = flags_of(tasks, digits, tiny_qwen3, tmp_path, never_ends)
    with RealRun(tmp_path / "run", [*flags, "--fully-async"], script="train_async.py") as run:
        run.wait_until("the evaluation", (run.run_dir / BEGUN).exists)
        hit(victim_of(run, SERVER, 1), signal.SIGKILL)
        assert run.wait() == 0, run.tail
    found = evaluations(run)
    assert list(found) == EVALUATED and found[-1]["eval/num_failed_evaluations"] == 1, found
    assert "eval/held" not in found[-1] and "the run goes on" in run.output, run.tail
    assert sorted(run.metrics("train")) == list(range(STEPS))
    require_balance(run.metrics("train"))
    assert run.left() == []
