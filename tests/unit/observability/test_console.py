"""What the console says: each kind of run in its own words, the time left without the start, and the log has it too."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from slime.observability.progress import StartUp
from slime.observability.sinks import ConsoleSink, StepRecord

NAN = float("nan")


def line(kind: str, **metrics: float) -> str:
    return ConsoleSink(num_rollout=4).line(StepRecord(kind, 1, {n.replace("__", "/"): v for n, v in metrics.items()}))


@pytest.mark.parametrize("kind", ["rollout", "train", "eval", "perf"])
def test_every_line_names_its_step_in_the_same_form(kind: str) -> None:
    """Law: a step has one number, its `rollout_id`, whatever the line is about."""
    after = "after " if kind == "eval" else ""
    assert ConsoleSink(num_rollout=6).line(StepRecord(kind, 2, {})).split() == f"{kind} {after}step 2 of 0..5".split()
    assert ConsoleSink().line(StepRecord(kind, 2, {})).split() == f"{kind} {after}step 2".split()


def test_the_evaluation_before_the_first_step_has_no_number() -> None:
    assert ConsoleSink(num_rollout=6).line(StepRecord("eval", -1, {"eval/sums": 0.25})).split() == [
        *("eval", "before", "step", "0"),
        *("sums", "0.250"),
    ]


def test_the_parts_of_a_step_are_those_that_the_driver_logs() -> None:
    shown = line("perf", perf__step_time=9.0, perf__rollout_wait_time=6.0, perf__train_time=2.5, perf__eval_time=0.25)
    assert "took 9.0 s  wait for batch 6.0 s  train 2.5 s  evaluation 0.2 s" in shown


def test_fine_tuning_speaks_of_loss_and_of_no_reward() -> None:
    metrics = {"train__loss": 2.5, "train__grad_norm": 1.0}
    assert "loss 2.5000  grad norm 1" in line("train", **metrics)
    conversations = {"rollout__total_len__mean": 12.5, "rollout__trained_tokens": 250.0}
    shown = line("rollout", **conversations, rollout__raw_reward=0.0, rollout__truncated_ratio=0.0)
    assert shown.endswith("mean length 12.5 tokens  trained tokens 250") and "reward" not in shown
    assert shown.split()[0] == "data" and "rollout" not in shown, "nothing is rolled out"
    assert line("rollout", rollout__trained_tokens=250.0).endswith("trained tokens 250"), "a user's function says less"
    held_out = ConsoleSink().line(StepRecord("eval", 3, {"eval/sums": 0.5, "eval/talks-loss": 1.25}))
    assert held_out.endswith("sums 0.500  talks loss 1.2500")


def test_an_evaluation_that_failed_is_no_empty_line() -> None:
    failed = {"eval/num_failed_evaluations": 2.0}
    assert ConsoleSink().line(StepRecord("eval", 3, failed)).endswith("after step 3     failed evaluations so far 2")
    assert "failed" not in ConsoleSink().line(StepRecord("eval", 3, {**failed, "eval/sums": 0.5})), "an earlier one did"


def test_the_time_left_is_that_of_the_steps_alone() -> None:
    """Law: what came before the first step of this process, its start or an earlier process, is not in the estimate."""
    sink = ConsoleSink(num_rollout=10)
    assert sink.line(StepRecord("perf", 6, {"perf/step_time": 4.0})).endswith("about 12 s left (from one step)")
    assert sink.line(StepRecord("perf", 7, {"perf/step_time": 8.0})).endswith("about 12 s left")
    assert "left" not in sink.line(StepRecord("perf", 9, {"perf/step_time": 4.0})), "it is over"


def test_the_time_left_counts_each_evaluation_that_is_due_once() -> None:
    """Law: an evaluation is neither spread over the steps between evaluations nor forgotten."""
    console = Console(file=(shown := io.StringIO()), width=200)
    sink = ConsoleSink(num_rollout=6, eval_interval=2, console=console)
    sink.write(StepRecord("eval", -1, {"eval/sums": 0.25, "perf/eval_time": 30.0}))
    sink.write(StepRecord("perf", 0, {"perf/step_time": 10.0}))
    sink.write(StepRecord("perf", 1, {"perf/step_time": 50.0, "perf/eval_time": 40.0}))
    lefts = [line.partition("about ")[2] for line in shown.getvalue().splitlines() if "perf" in line]
    assert lefts == ["2 min 20 s left (from one step)", "2 min 00 s left"], "5 x 10 + 3 x 30, then 4 x 10 + 2 x 40"


@pytest.mark.parametrize(
    ("loss", "shown"),
    [(5e-9, ""), (-5e-9, ""), (0.0, ""), (-3e-5, "loss -3.0e-05"), (-0.0123, "loss -0.0123"), (NAN, "loss nan")],
)
def test_a_policy_loss_that_is_rounding_error_is_left_out(loss: float, shown: str) -> None:
    said = line("train", train__loss=loss, train__pg_loss=loss, train__entropy_loss=1.04)
    assert said.endswith(f" {shown}  entropy 1.04" if shown else "0..3   entropy 1.04")


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [(0.0, "0%"), (0.004, "<1%"), (0.006, "1%"), (0.996, ">99%"), (1.0, "100%"), (-0.0, "0%"), (NAN, "nan%")],
)
def test_a_share_is_none_or_all_only_if_it_is(ratio: float, shown: str) -> None:
    assert line("rollout", rollout__truncated_ratio=ratio).endswith(f"truncated {shown} of samples")


def test_numbers_have_units() -> None:
    said = line("train", train__pg_clipfrac=0.0001, train__train_rollout_logprob_abs_diff_max=2.8e-5)
    assert said.endswith("clipped <0.1% of tokens  largest mismatch 2.8e-05 nats")
    assert line("rollout", rollout__response_len__mean=11.8).endswith("mean length 11.8 tokens")


def test_a_probe_is_shown_as_one() -> None:
    assert line("perf", probe__train_rollout_logprob_abs_diff_max=2e-6).endswith(
        "largest mismatch of the probe 2.0e-06 nats"
    )


def test_the_log_has_the_lines_of_the_console(caplog: pytest.LogCaptureFixture) -> None:
    shown = io.StringIO()
    with caplog.at_level(logging.INFO):
        ConsoleSink(console=Console(file=shown, width=200)).write(StepRecord("train", 0, {"train/loss": 0.5}))
    assert shown.getvalue().strip() == caplog.messages[0].strip() and "loss 0.5000" in shown.getvalue()
    assert getattr(caplog.records[0], "file_only", False), "the console would show it twice"


def test_phases_of_the_start_are_lines_and_metrics_and_end_with_the_first_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    startup = StartUp()
    with caplog.at_level(logging.INFO):
        with startup.phase("ray", "Ray is up"):
            pass
        startup.done("engines", "engines are up (2)", 31.25)
        startup.part("engine_import", 20.0)
        metrics = startup.end()
        with startup.phase("update_weights", "never told"):
            pass
    assert [m.partition(",")[0] for m in caplog.messages[:2]] == ["Ray is up", "engines are up (2)"]
    assert caplog.messages[1] == "engines are up (2), 31.2 s" and "never told" not in caplog.text
    assert set(metrics) == {f"startup/{n}_time" for n in ("ray", "engines", "engine_import", "total")}
    assert startup.end() == {}


def test_a_phase_that_fails_is_not_told_as_done(caplog: pytest.LogCaptureFixture) -> None:
    startup = StartUp()
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match="x"), startup.phase("ray", "Ray is up"):
        raise ValueError("x")
    assert "Ray is up" not in caplog.text
