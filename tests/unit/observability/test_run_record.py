"""What a run leaves behind is complete, survives a kill and holds no secret."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from slime.core.errors import ConfigError, DataError
from slime.core.text import HIDDEN
from slime.observability.report import summarize, summary_text, write_report
from slime.observability.run_folder import RunFolder, plain
from slime.observability.samples import DROPPED_ROWS
from slime.observability.sinks import ConsoleSink, StepRecord, TensorBoardSink, eval_name, read_jsonl
from slime.observability.start_record import hide_secrets
from slime.observability.tracker import Tracker


class BrokenView:
    """A sink whose service is gone."""

    essential = False

    def __init__(self) -> None:
        self.num_calls = 0

    def write(self, record: StepRecord) -> None:
        self.num_calls += 1
        raise ConnectionError("gone")

    def close(self, *, failed: bool = False) -> None:
        raise ConnectionError("still gone")


def make_folder(path: Path) -> RunFolder:
    return RunFolder.create(path, run_id="run-1", args={"lr": 1e-5, "wandb_key": "abc", "megatron": {"bf16": True}})


def test_a_run_folder_is_its_owners_until_he_opens_it(tmp_path: Path) -> None:
    """Law: prompts and answers are in it, also in logs. A resume leaves the mode that its owner gave it."""
    before = os.umask(0)
    try:
        folder = make_folder(tmp_path / "not there" / "run")
        assert folder.path.stat().st_mode & 0o777 == 0o700
        folder.path.chmod(0o750)
        assert make_folder(folder.path).path.stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)


def test_a_start_records_what_had_no_effect(tmp_path: Path) -> None:
    idle = {"lora_alpha": "8.0, which needs --lora-rank"}
    folder = RunFolder.create(tmp_path / "run", run_id="run-1", args={}, without_effect=idle)
    make_folder(folder.path)
    starts = json.loads((folder.path / "run.json").read_text())["starts"]
    assert [start["without_effect"] for start in starts] == [idle, {}]


def test_a_folder_is_made_whole_and_joined_on_resume(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    folder.metrics.write_text('{"train/step": 0}\n')
    make_folder(tmp_path / "run")
    assert folder.metrics.read_text() == '{"train/step": 0}\n'
    assert len(json.loads((folder.path / "run.json").read_text())["starts"]) == 2
    assert folder.logs.is_dir() and folder.traces.is_dir()
    assert [p.name for p in tmp_path.iterdir()] == ["run"], "the partial folder stayed behind"


@pytest.mark.parametrize(
    ("load", "steps", "kept"), [(None, 0, False), ("s", 0, False), (None, 1, False), ("s", 1, True)]
)
def test_dropped_rows_are_those_of_launches_that_count(
    tmp_path: Path, load: str | None, steps: int, kept: bool
) -> None:
    """Law: what a refused start dropped is not said of the start after it."""
    folder = make_folder(tmp_path / "run")
    (folder.path / DROPPED_ROWS).write_text("{}\n")
    folder.metrics.write_text('{"rollout/step": 0}\n' * steps)
    RunFolder.create(folder.path, run_id="b", args={"load": load})
    assert (folder.path / DROPPED_ROWS).exists() == kept


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="not a run folder"):
        make_folder(tmp_path)


def test_secrets_are_not_written(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    assert "abc" not in (folder.path / "args.json").read_text()
    assert plain({"api_key": "s", "input_key": "text", "eval_label_key": "a", "num_tokens": 3}) == {
        "api_key": HIDDEN,
        "input_key": "text",
        "eval_label_key": "a",
        "num_tokens": 3,
    }
    assert hide_secrets(["--wandb-key", "s", "--lr", "1", "--auth-token=s"]) == [
        "--wandb-key",
        HIDDEN,
        "--lr",
        "1",
        f"--auth-token={HIDDEN}",
    ]
    files = ["--wandb-key", "@/run/key", "--router-api-key=@key"]
    assert hide_secrets(files) == files, "where a secret is, is none"


def test_every_logged_step_is_on_disk_at_once(tmp_path: Path) -> None:
    tracker = Tracker(make_folder(tmp_path / "run"))
    tracker.log("train", 3, {"train/loss": math.nan, "train/grad_norm": math.inf})
    row = read_jsonl(tracker.folder.metrics)[0]
    assert row["train/step"] == 3 and math.isnan(row["train/loss"]) and math.isinf(row["train/grad_norm"])
    tracker.close()


def test_a_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"train/step": 0}\n{"train/st')
    assert read_jsonl(path) == [{"train/step": 0}]


def test_a_line_cut_by_a_kill_costs_a_resumed_run_no_step(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    folder.metrics.write_text('{"train/step": 0}\n{"train/st')
    for step in (1, 2):
        with Tracker(folder) as tracker:
            tracker.log("train", step, {"train/loss": 1.0})
    assert [row["train/step"] for row in read_jsonl(folder.metrics)] == [0, 1, 2]
    assert len(folder.metrics.read_text().splitlines()) == 4, "a whole file gets no empty line"


def test_a_broken_view_is_dropped_and_the_record_goes_on(tmp_path: Path) -> None:
    view = BrokenView()
    tracker = Tracker(make_folder(tmp_path / "run"), [view])
    for step in range(3):
        tracker.log("train", step, {"train/loss": 1.0})
    tracker.close()
    assert view.num_calls == 1
    assert len(read_jsonl(tracker.folder.metrics)) == 3


def test_a_step_is_logged_once_and_in_order(tmp_path: Path) -> None:
    tracker = Tracker(make_folder(tmp_path / "run"))
    tracker.log("train", 1, {"train/loss": 1.0})
    with pytest.raises(DataError, match="after step 1"):
        tracker.log("train", 1, {"train/loss": 1.0})
    assert tracker.log("train", 2, {"loss": 1.0}) == {"train/loss": 1.0}
    with pytest.raises(DataError, match="kind of step"):
        tracker.log("step", 2, {"train/loss": 1.0})


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.write(StepRecord("train", 5, {"train/loss": 0.25}))
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(5, 0.25)]


def test_what_was_added_goes_into_the_next_perf_record(tmp_path: Path) -> None:
    with Tracker(make_folder(tmp_path / "run")) as tracker:
        tracker.add({"update_weights_bytes": 8})
        tracker.log("rollout", 0, {"rollout/raw_reward": 1.0})
        assert tracker.log("perf", 0, {"perf/step_time": 2.0}) == {"perf/update_weights_bytes": 8, "perf/step_time": 2}
        assert tracker.log("perf", 1, {"perf/step_time": 2.0}) == {"perf/step_time": 2}
    assert [row["rollout/step"] for row in read_jsonl(tracker.folder.metrics)] == [0, 0, 1]


def test_console_shows_the_headlines_and_the_time_left() -> None:
    sink = ConsoleSink(num_rollout=4)
    line = sink.line(StepRecord("rollout", 1, {"rollout/raw_reward": 0.5, "rollout/other": 1}))
    assert "rollout  step 1 of 0..3 " in line and "reward 0.500" in line and "other" not in line
    assert sink.line(StepRecord("perf", 1, {"perf/step_time": 20.0})).endswith("about 40 s left (from one step)")


@pytest.mark.parametrize(
    ("key", "name"),
    [("eval/gsm8k-test", "gsm8k-test"), ("eval/sums", "sums"), ("eval/num_theory", "num_theory")]
    + [
        (k, None)
        for k in (
            "eval/step",
            "eval/weight_version",
            "eval/sums-pass@16",
            "eval/sums-num_prompts",
            "eval/sums-num_failed",
            "eval/sums-num_failed_samples",
            "eval/num_failed",
            "eval/num_unscored_samples",
            "eval/sums/response_len/mean",
        )
    ],
)
def test_eval_scores_are_told_from_their_details(key: str, name: str | None) -> None:
    assert eval_name(key) == name


def test_the_report_says_before_and_after(tmp_path: Path) -> None:
    tracker = Tracker(make_folder(tmp_path / "run"))
    for step, accuracy in ((-1, 0.25), (1, 0.75)):
        tracker.log("eval", step, {"eval/sums": accuracy})
    for step in range(2):
        tracker.log("rollout", step, {"rollout/raw_reward": step / 2})
        tracker.log("train", step, {"train/train_rollout_logprob_abs_diff_max": 1e-6 * (step + 1)})
        tracker.log("perf", step, {"perf/rollout_time": 3.0, "perf/train_time": 2.0})
    tracker.close()
    report = write_report(tracker.folder.path, title="tiny")
    summary = report.summary
    assert summary.evals == {"sums": (0.25, 0.75)}
    assert summary.worst_mismatch == 2e-6 and summary.step_s == 5.0 and summary.num_rollouts == 2
    assert report.picture.read_bytes().startswith(b"\x89PNG")
    assert "| held-out score, sums | 0.250 | 0.750 | +0.500 |" in summary_text(summary)


def test_a_run_that_died_early_still_gets_its_report(tmp_path: Path) -> None:
    tracker = Tracker(make_folder(tmp_path / "run"))
    with pytest.raises(DataError):
        summarize(tracker.folder.path)
    tracker.log("eval", 0, {"eval/sums": 0.5})
    assert write_report(tracker.folder.path, tmp_path / "elsewhere").summary.reward is None
    tracker.folder.write_report()
    assert all((tracker.folder.path / f"report.{suffix}").is_file() for suffix in ("md", "html", "png"))
