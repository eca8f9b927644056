"""How a run ends is told in one message and one exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slime.core.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    HookError,
    NumericsError,
    Terminated,
    WeightSyncError,
)
from slime.settings import Args, run_or_exit


@pytest.fixture
def command_line(tiny_qwen3: Path, tmp_path: Path) -> list[str]:
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    return [
        *("--hf-checkpoint", str(tiny_qwen3), "--run-dir", str(run_dir), "--rollout-batch-size", "2"),
        *("--num-rollout", "1", "--n-samples-per-prompt", "2", "--data-source-path", "a.b", "--rm-type", "math"),
        *("--rollout-max-response-len", "8"),
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((kind("no way"), 1) for kind in (EngineError, NumericsError, WeightSyncError, DeadlineExceeded)),
        *((kind("no way"), 2) for kind in (ConfigError, HookError)),
    ],
)
def test_an_error_of_ours_is_one_message(
    error: Exception, code: int, command_line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: Args) -> None:
        raise error

    with pytest.raises(SystemExit) as end:
        run_or_exit(fail, command_line)
    said = capsys.readouterr().err
    assert end.value.code == code and said.startswith(f"{type(error).__name__}: no way\n")
    assert ("run/logs" in said) == (code == 1), "a failed run says where its logs are"


def test_what_was_noted_on_the_way_up_is_said_after_the_message(
    command_line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: who held the memory and how to go on are lines of their own, after the one sentence."""

    def fail(args: Args) -> None:
        error = EngineError("a process died")
        error.add_note("memory: it was large")
        error.add_note("to go on: python train.py")
        raise error

    with pytest.raises(SystemExit):
        run_or_exit(fail, command_line)
    said = capsys.readouterr().err.splitlines()
    assert said[:3] == ["EngineError: a process died", "memory: it was large", "to go on: python train.py"]


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [(KeyboardInterrupt(), 130, "interrupted; the run"), (Terminated(143), 143, "terminated by SIGTERM; the run")],
)
def test_who_ends_a_run_hears_that_it_is_over(
    end: BaseException, code: int, said: str, command_line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(args: Args) -> None:
        end.add_note("to go on: python train.py")
        raise end

    with pytest.raises(SystemExit) as ended:
        run_or_exit(stop, command_line)
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == code and lines[0].startswith(said) and lines[1] == "to go on: python train.py"


def test_a_terminal_obeys_nothing_in_the_message(command_line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An error may quote what a model said; its own lines stay lines."""

    def fail(args: Args) -> None:
        raise EngineError("no answer in '\x1b]0;title\x07[/INST]'\nsecond line")

    with pytest.raises(SystemExit):
        run_or_exit(fail, command_line)
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["EngineError: no answer in '\\x1b]0;title\\x07[/INST]'", "second line"]


def test_another_error_keeps_its_traceback(command_line: list[str]) -> None:
    def fail(args: Args) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_or_exit(fail, command_line)


def test_ctrl_c_is_one_line_and_130(command_line: list[str]) -> None:
    code = (
        "import time, sys\nfrom slime.settings import run_or_exit\n"
        "def wait(args):\n    print('up', flush=True)\n    time.sleep(60)\n"
        f"run_or_exit(wait, {command_line!r})\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.startswith("interrupted; ") and len(said.splitlines()) == 1, said
