"""Times add up per step, traces survive a kill, and a silent worker is still seen."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from slime.observability.progress import Progress, duration
from slime.observability.spans import Spans, read_trace


def test_times_are_summed_by_name_and_drained() -> None:
    recorder = Spans()
    for _ in range(3):
        with recorder("train"):
            time.sleep(0.01)
    times = recorder.collect()
    assert set(times) == {"perf/train_time", "perf/step_time"}
    assert 0.03 <= times["perf/train_time"] <= times["perf/step_time"]
    assert set(recorder.collect()) == {"perf/step_time"}


def test_a_failed_span_is_recorded(tmp_path: Path) -> None:
    recorder = Spans("test", tmp_path / "t.json")
    with pytest.raises(ValueError, match="x"), recorder("train"):
        raise ValueError("x")
    assert "perf/train_time" in recorder.collect()
    assert read_trace(tmp_path / "t.json")[-1]["args"] == {"error": "ValueError"}, "the trace is read before its end"


def test_what_another_process_did_is_noted_beside_the_own_spans_and_counts_no_time(tmp_path: Path) -> None:
    recorder = Spans("test", tmp_path / "t.json")
    with recorder("train"):
        recorder.note("generation", 100.0, 102.5, rollout_id=3)
    assert set(recorder.collect()) == {"perf/train_time", "perf/step_time"}
    noted, own = (e for e in read_trace(tmp_path / "t.json") if e["ph"] == "X")
    assert (noted["ts"], noted["dur"], noted["args"]) == (100_000_000, 2_500_000, {"rollout_id": 3})
    assert noted["tid"] != own["tid"], "rows do not overlap"


async def test_concurrent_tasks_get_rows_of_their_own(tmp_path: Path) -> None:
    recorder = Spans("test", tmp_path / "t.json")

    async def work() -> None:
        with recorder("generate", timed=False):
            await asyncio.sleep(0.01)

    await asyncio.gather(work(), work())
    recorder.close()
    rows = {e["tid"] for e in read_trace(tmp_path / "t.json") if e["ph"] == "X"}
    assert len(rows) == 2
    assert set(recorder.collect()) == {"perf/step_time"}, "work side by side has no sum"


def test_a_line_says_how_far_how_long_and_how_silent() -> None:
    progress = Progress("rollout, step 3", total=8, unit="samples", every_s=10, tty=False)
    progress._start_s = 0.0
    progress.advance(2)
    progress._moved_s = 20.0
    assert progress.line(20.0) == "rollout, step 3: 2/8 samples, 20 s (about 1 min 00 s left)"
    assert progress.line(60.0).endswith("no progress for 40 s")
    assert Progress("engines", limit_s=600, tty=False).line().endswith("of at most 10 min 00 s")


def test_heartbeats_come_without_any_progress_and_end_with_the_block(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="slime.progress"):
        with Progress("waiting", every_s=0.02, tty=False):
            while len(caplog.records) < 2:  # the limit of the test ends it
                time.sleep(0.02)
        num_lines = len(caplog.records)
        time.sleep(0.1)
    assert len(caplog.records) == num_lines


@pytest.mark.parametrize(("total", "shown"), [(None, False), (8, True)])
def test_a_bar_counts_only_what_has_a_total(total: int | None, shown: bool) -> None:
    """Law: a wait without a known end shows neither `0/?` nor an empty time left."""
    console = Console(force_terminal=True, file=(text := StringIO()), width=200)
    with Progress("engines", total=total, tty=True, console=console):
        pass
    assert ("0/" in text.getvalue()) is shown and ("-:--:--" in text.getvalue()) is shown


def test_a_bar_does_not_run_its_name_into_the_note() -> None:
    console = Console(force_terminal=True, file=(text := StringIO()), width=200)
    with Progress("rollout, step 3", tty=True, console=console) as progress:
        progress.note("2/8 groups")
    assert "rollout, step 3: 2/8 groups" in text.getvalue()


HOSTILE = "ValueError: no answer in 'hello [/INST] :smile:\x1b]0;title\x07\nmore'"


def test_a_bar_shows_what_a_model_said_and_obeys_none_of_it() -> None:
    """Law: neither rich's markup nor an escape of the terminal works in the news, and the block ends well."""
    console = Console(force_terminal=True, file=(shown := StringIO()), width=400)
    with Progress("rollout, step 3", tty=True, console=console) as progress:
        progress.note(HOSTILE)
    said = shown.getvalue()
    assert "hello [/INST] :smile:\\x1b]0;title\\x07⏎more'" in said
    assert "\x1b]0;" not in said and "\x07" not in said


def test_a_line_shows_what_a_model_said_as_one_visible_line() -> None:
    progress = Progress("rollout, step 3", tty=False)
    progress.note(HOSTILE + "x" * 10_000)
    line = progress.line()
    assert "hello [/INST] :smile:\\x1b]0;title\\x07⏎more'" in line
    assert line.isprintable() and len(line) < 500


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (65, "1 min 05 s"), (3780, "1 h 03 min")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_observability_imports_nothing_heavy() -> None:
    code = (
        "import sys, slime.observability.tracker, slime.observability.spans, slime.observability.report, "
        "slime.observability.logs; "
        "bad = {'torch', 'matplotlib', 'rich', 'tensorboard', 'ray', 'transformers'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
