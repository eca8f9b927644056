"""What the model said is on disk whole, survives a kill and a resume, and cannot write into a terminal or a page."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from slime.cli.main import main
from slime.core.text import shorten, visible
from slime.observability.run_folder import RunFolder
from slime.observability.samples import (
    Kind,
    SamplesFile,
    ShownSample,
    console_lines,
    first_and_last,
    is_due,
    read_samples,
    samples_markdown,
)
from slime.observability.sinks import ConsoleSink, StepRecord, TensorBoardSink
from slime.observability.tracker import Tracker

BEST = ShownSample(
    kind="rollout",
    step=0,
    prompt="<|user|>3+4=<|assistant|>",
    response="7<eos>",
    reward=1.0,
    label="7",
    status="completed",
    response_length=2,
    weight_version=1,
    finish_reason="stop",
    picked="best",
    group_index=5,
    index=11,
    more={"num_turns": 2, "tool_calls": 1},
)
WORST = dataclasses.replace(BEST, picked="worst", reward=0.0, response="8<eos>", index=12)
HELD_OUT = dataclasses.replace(BEST, kind="eval", dataset="sums", step=-1, label=None)


def of_step(step: int, *samples: ShownSample) -> list[ShownSample]:
    return [dataclasses.replace(sample, step=step) for sample in samples or (BEST, WORST)]


def write(run: Path, *batches: Sequence[ShownSample]) -> Path:
    run.mkdir(exist_ok=True)
    file = SamplesFile(run / "samples.jsonl")
    for batch in batches:
        file.append(batch)
    return run


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    odd = dataclasses.replace(BEST, response="数\n\u2028\x85 \ud800", reward=math.nan)
    path = write(tmp_path, [BEST, odd], [HELD_OUT]) / "samples.jsonl"
    assert read_samples(path) == [BEST, dataclasses.replace(odd, reward=None), HELD_OUT]
    rows = [json.loads(line) for line in path.read_text(errors="strict").split("\n") if line]
    assert len(rows) == 3 and rows[0]["time"] == rows[1]["time"], "one line is one sample"


def test_a_line_that_a_kill_left_half_done_costs_no_other(tmp_path: Path) -> None:
    path = write(tmp_path, of_step(0)) / "samples.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "rollout", "step": 1, "pro')
    write(tmp_path, of_step(1))
    assert read_samples(path) == of_step(0) + of_step(1)


def test_of_a_step_done_again_the_later_samples_count(tmp_path: Path) -> None:
    again = of_step(1, WORST)
    path = write(tmp_path, of_step(0), of_step(1), again, [HELD_OUT], of_step(2)) / "samples.jsonl"
    assert read_samples(path) == [*of_step(0), *again, HELD_OUT, *of_step(2)]


def test_a_missing_file_is_a_run_without_samples(tmp_path: Path) -> None:
    assert read_samples(tmp_path / "samples.jsonl") == [] and samples_markdown(tmp_path / "samples.jsonl", 4) == ""


def test_what_a_terminal_would_obey_is_spelled_out() -> None:
    assert visible("a\x1b[2J\r\n\tb\u202e\ud800\x9b") == "a\\x1b[2J\\x0d\n\tb\\u202e\\ud800\\x9b"
    hostile = dataclasses.replace(BEST, prompt="\x1b[31mx\ny", response="[bold]z[/bold] :smile:\x07")
    sink = ConsoleSink(console=Console(file=(shown := StringIO()), highlight=False))
    sink.write_samples("rollout", 0, [hostile])
    assert "\x1b" not in shown.getvalue() and "\x07" not in shown.getvalue()
    assert "[bold]z[/bold] :smile:" in shown.getvalue() and "x⏎y" in shown.getvalue()


def test_a_long_text_says_how_much_is_left_out() -> None:
    assert shorten("abc", 3) == "abc"
    short = shorten("a" * 50 + "b" * 50, 10)
    assert short == "aaaaa [... 90 characters left out ...] bbbbb"


def test_a_table_holds_whatever_the_model_said(tmp_path: Path) -> None:
    hostile = dataclasses.replace(BEST, response="a|b\n`c` <script>`` | [x](y)", label="`")
    text = samples_markdown(write(tmp_path, [hostile]) / "samples.jsonl", 4)
    rows = [line for line in text.split("\n") if line.startswith("|")]
    assert text.startswith("## Samples") and len(rows) == 3
    assert rows[2].replace("\\|", "").count("|") == 8, "a cell ended inside a text"
    assert "```a\\|b⏎`c` <script>`` \\| [x](y)```" in rows[2] and "`` ` ``" in rows[2]


def test_the_table_compares_the_first_with_the_last_step(tmp_path: Path) -> None:
    samples = [s for step in range(5) for s in of_step(step)]
    shown = first_and_last([HELD_OUT, *samples], 5)
    assert [(s.kind, s.step) for s in shown] == [("eval", -1), *[("rollout", 0)] * 2, *[("rollout", 4)] * 2]
    assert len(first_and_last(samples, 3)) == 3


def test_the_console_shows_samples_ever_more_rarely() -> None:
    assert [step for step in range(-1, 20) if is_due(step, None)] == [0, 1, 3, 7, 15]
    assert [step for step in range(10) if is_due(step, 4)] == [0, 3, 7]
    assert not any(is_due(step, 0) for step in range(10))
    lines = console_lines([dataclasses.replace(BEST, picked="random"), WORST, BEST])
    assert [line.split(" | ")[0] for line in lines[::2]] == ["best reward 1 label 7", "worst reward 0 label 7"]
    assert lines[1] == "  -> 7<eos>"
    unjudged = dataclasses.replace(BEST, picked="random", reward=None, label=None)
    assert console_lines([unjudged, unjudged])[0] == "random | <|user|>3+4=<|assistant|>"


class BrokenView:
    """Shows metrics, and fails on samples."""

    essential = False

    def __init__(self) -> None:
        self.num_calls = 0

    def write(self, record: StepRecord) -> None: ...

    def write_samples(self, kind: Kind, step: int, samples: Sequence[ShownSample]) -> None:
        self.num_calls += 1
        raise ConnectionError("gone")

    def close(self) -> None: ...


def test_samples_that_cannot_be_shown_or_written_end_no_run(tmp_path: Path) -> None:
    view, folder = BrokenView(), RunFolder.create(tmp_path / "run", run_id="run-1", args={})
    with Tracker(folder, [view]) as tracker:
        tracker.log_samples("rollout", 0, of_step(0))
        tracker.log_samples("rollout", 1, [])
        assert read_samples(folder.samples) == of_step(0)
        folder.samples.unlink()
        folder.samples.mkdir()
        tracker.log_samples("rollout", 1, of_step(1))
        tracker.log("rollout", 1, {"rollout/raw_reward": 1.0})
    assert view.num_calls == 1


def test_tensorboard_reads_the_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.text.metadata import PLUGIN_NAME
    from tensorboard.util.tensor_util import make_ndarray

    sink = TensorBoardSink(tmp_path)
    sink.write_samples("rollout", 3, of_step(3))
    sink.write_samples("eval", 3, [HELD_OUT])
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.PluginTagToContent(PLUGIN_NAME)) == [
        "samples/eval/sums/text_summary",
        "samples/rollout/text_summary",
    ]
    (event,) = events.Tensors("samples/rollout/text_summary")
    text = make_ndarray(event.tensor_proto).item().decode()
    assert event.step == 3 and "    8<eos>" in text and "    <|user|>3+4=<|assistant|>" in text


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["samples", *words]) == 0
    return capsys.readouterr().out


def test_the_command_prints_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write(tmp_path / "run", *(of_step(step) for step in range(4)), [HELD_OUT]))
    newest = printed(capsys, run)
    assert newest.count("prompt") == 6 and "step 3, best" in newest and "step 0" not in newest and "\x1b" not in newest
    assert printed(capsys, run, "--step", "1").count("step 1") == 2
    only = printed(capsys, run, "--worst", "-n", "9")
    assert only.count("worst") == 4 and "best" not in only
    assert (
        "eval sums, before step 0, best" in printed(capsys, run, "--eval") == printed(capsys, run, "--dataset", "sums")
    )
    rows = [json.loads(line) for line in printed(capsys, run, "--json", "--step", "2").splitlines()]
    assert [ShownSample.from_dict(row) for row in rows] == of_step(2)


def test_a_sample_of_fine_tuning_is_training_data_without_a_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = dataclasses.replace(BEST, reward=None, weight_version=None, finish_reason=None, picked="random", more={})
    run = str(write(tmp_path / "run", [learned]))
    assert "training data, step 0, random | 2 tokens, completed\n" in printed(capsys, run)
    assert console_lines([learned])[0].startswith("from the data label 7 | ")


def test_the_command_shows_metadata_short_unless_asked_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = dataclasses.replace(BEST, metadata={"judge": "right\n" + "x" * 999, "trace": [{"tool": "ls\x1b"}]})
    nested = {"coding": {"graded": {"code": 1, "said": "FAIL: a\nOK: b"}}}
    judged = dataclasses.replace(judged, metadata={**judged.metadata, **nested})
    run = str(write(tmp_path / "run", [judged]))
    short = printed(capsys, run)
    assert "metadata  judge: right⏎xxx" in short and "805 characters left out" in short
    assert 'trace: [{"tool": "ls\\u001b"}]' in short and "\x1b" not in short
    full = printed(capsys, run, "--full")
    assert "x" * 999 in full and "coding.graded.code: 1\n" in full, "entries below each other"
    assert "coding.graded.said: FAIL: a\n            OK: b\n" in full


def test_the_command_says_what_there_is_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", of_step(0), of_step(4))
    assert main(["samples", str(run), "--step", "2"]) == 2
    assert "rollout, step 0 to step 4" in capsys.readouterr().err
    (tmp_path / "run.json").touch()
    assert main(["samples", str(tmp_path)]) == 2
    assert "has no samples" in capsys.readouterr().err
