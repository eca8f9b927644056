"""A run that goes wrong is warned of, once, with a remedy; a run that learns is not."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from slime.observability.health import DETECTORS, HealthSink, findings, learns_from_rewards
from slime.observability.run_folder import RunFolder
from slime.observability.sinks import StepRecord, read_jsonl
from slime.observability.tracker import Tracker
from tests.support.made_runs import made_run

STD, REWARD, TRUNCATED = "rollout/raw_reward_std", "rollout/raw_reward", "rollout/truncated_ratio"
ENTROPY, MISMATCH = "train/entropy_loss", "train/train_rollout_logprob_abs_diff_current"
EMPTY, SPENT, SAMPLES = "rollout/num_empty_turns", "rollout/num_empty_turns/max_context_len", "rollout/num_samples"
AGAIN, TOKENS = "rollout/num_tokens_trained_again", "rollout/response_tokens"
REFUSED = "rollout/num_refused_samples"
PROBE = "probe/train_rollout_logprob_abs_diff_mean"
NO_SIGNAL, STEP_S, TFLOPS = "rollout/zero_std/ratio", "perf/step_time", "perf/actor_train_tflops"
SLOWEST, SLOWEST_S, MEDIAN_S = "perf/slowest_rank", "perf/slowest_rank_train_time", "perf/median_rank_train_time"


def rows(axis: str, **values: Sequence[float]) -> list[Mapping[str, float]]:
    """A row for each step; the names of the metrics are those of this module's constants."""
    names = {name: globals()[name] for name in values}
    count = len(next(iter(values.values())))
    return [{axis: i, **{names[name]: series[i] for name, series in values.items()}} for i in range(count)]


WRONG = {
    "equal rewards": rows("rollout/step", STD=[0.4, 0, 0], REWARD=[0.5, 0, 0]),
    "no learning signal": rows("rollout/step", NO_SIGNAL=[0.5, 1, 1], STD=[0.4] * 3, REWARD=[0.5] * 3),
    "rising step time": rows("rollout/step", TOKENS=[1000] * 13, STEP_S=[10] * 10 + [25] * 3),
    "straggler": rows("train/step", SLOWEST=[5] * 6, SLOWEST_S=[6] * 6, MEDIAN_S=[4] * 6),
    "MFU drop": rows("train/step", TFLOPS=[200] * 10 + [100] * 3),
    "truncation": rows("rollout/step", TRUNCATED=[0.2, 0.6, 0.7, 0.8]),
    "turns without tokens": rows("rollout/step", EMPTY=[0, 9], SPENT=[0, 9], SAMPLES=[64, 64]),
    "tokens trained again": rows("rollout/step", TOKENS=[60, 64], AGAIN=[0, 16]),
    "refused samples": rows("rollout/step", REFUSED=[0, 3]),
    "entropy collapse": rows("train/step", ENTROPY=[0.8, 0.9, 0.7, 0.3, 0.01, 0.01, 0.01]),
    "rising mismatch": rows("train/step", MISMATCH=[0.01, 0.012, 0.011, 0.02, 0.04, 0.05, 0.06]),
    "rising mismatch of the probe": rows("rollout/step", PROBE=[0.01, 0.012, 0.011, 0.02, 0.04, 0.05, 0.06]),
}
WELL = {
    "one step without a reward": rows("rollout/step", STD=[0.4, 0, 0.4, 0], REWARD=[0.5, 0, 0.5, 0]),
    "half of a small batch is truncated, twice": rows("rollout/step", TRUNCATED=[0.9, 0.8, 0.5, 0.9, 0.2]),
    "always truncated to exactly half": rows("rollout/step", TRUNCATED=[0.5] * 9),
    "a few long executions": rows("rollout/step", EMPTY=[3] * 9, SPENT=[3] * 9, SAMPLES=[64] * 9),
    "samples that share no trained token": rows("rollout/step", TOKENS=[60] * 9, AGAIN=[0] * 9),
    "entropy falls while the task is learnt": rows("train/step", ENTROPY=[0.8, 0.5, 0.3, 0.2, 0.15, 0.1, 0.09]),
    "a sharp policy from the start": rows("train/step", ENTROPY=[0.02] * 9),
    "float32 rounds": rows("train/step", MISMATCH=[1e-7, 1e-7, 1e-7, 5e-7, 9e-7, 2e-6, 5e-6]),
    "one bad batch": rows("train/step", MISMATCH=[0.01, 0.01, 0.01, 0.09, 0.01, 0.01, 0.09]),
}


@pytest.mark.parametrize("kind", DETECTORS)
def test_what_is_wrong_is_found_once_and_says_what_to_do(kind: str) -> None:
    """Law: each detector finds its own case, once while it lasts, and no other detector does."""
    (found,) = findings(WRONG[kind])
    assert found.kind == kind and found.last_step is None
    assert ";" in found.text, "a warning says what was seen; and what to do"


@pytest.mark.parametrize("case", WELL)
def test_what_a_good_run_does_is_no_warning(case: str) -> None:
    assert findings(WELL[case]) == []


def test_a_spent_limit_is_named() -> None:
    (found,) = findings(WRONG["turns without tokens"])
    assert (
        found.text.startswith("9 turns of 64 samples got no token") and "9 by --rollout-max-context-len" in found.text
    )


def test_a_solved_task_may_be_sure_of_itself() -> None:
    sure = rows("train/step", ENTROPY=[0.8, 0.8, 0.8, 0.01, 0.01, 0.01, 0.01])
    solved = rows("rollout/step", REWARD=[0.5, 0.6, 0.9, 0.99, 0.99, 0.99, 0.99])
    both = [row for pair in zip(solved, sure, strict=True) for row in pair]
    assert findings(both) == [] and findings(sure) != []


def test_it_is_over_and_may_come_back() -> None:
    series = [0.9] * 3 + [0.1] * 3 + [0.9] * 3
    first, second = findings(rows("rollout/step", TRUNCATED=series))
    assert (first.step, first.last_step) == (2, 5)
    assert (second.step, second.last_step) == (8, None)


def test_a_made_run_that_learns_is_well(tmp_path: Path) -> None:
    for kind in ("sync", "async", "sft"):
        run = made_run(tmp_path / kind, kind, num_steps=60)
        assert findings(read_jsonl(run / "metrics.jsonl")) == [], kind


def test_rewards_of_distillation_may_be_equal() -> None:
    """Law: what does not learn from rewards is not warned of equal ones."""
    assert not learns_from_rewards({"use_opd": True}) and not learns_from_rewards({"loss_type": "sft_loss"})
    assert learns_from_rewards({"loss_type": "policy_loss", "use_opd": False})
    assert findings(WRONG["equal rewards"], learns_from_rewards=False) == []


def test_the_log_has_a_warning_where_it_begins_and_a_line_where_it_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = HealthSink(tmp_path / "metrics.jsonl")
    with caplog.at_level(logging.INFO, logger="slime.observability.health"):
        for step, share in enumerate([0.9] * 5 + [0.1] * 5):
            sink.write(StepRecord("rollout", step, {TRUNCATED: share}))
    assert [(record.levelname, record.args[0]) for record in caplog.records if record.args] == [
        ("WARNING", "truncation"),
        ("INFO", 7),
    ]


def test_a_resumed_run_remembers_its_start(tmp_path: Path) -> None:
    """Law: what a value was at the start is what it was at the start of the run, not of its latest process."""
    folder = RunFolder.create(tmp_path / "run", run_id="run-1", args={})
    with Tracker(folder) as tracker:
        for step in range(3):
            tracker.log("train", step, {ENTROPY: 0.8})
    sink = HealthSink(folder.metrics)
    found = [one for step in range(3, 6) for one in sink._watch.see(step, {ENTROPY: 0.01})]
    assert [one.kind for one in found] == ["entropy collapse"]
