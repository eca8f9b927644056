"""What the driver says when something ends: how to go on, who held the memory, which part of the start hangs."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import exceptions
from ray.exceptions import OutOfMemoryError, RayTaskError

from slime.cluster import launch_run
from slime.cluster import waiting as failures
from slime.cluster.launch_run import MemoryWatch, how_to_resume, resume_command
from slime.cluster.preflight import preflight
from slime.cluster.start_actors import LOGS_PER_POLL, StartProgress, Waiting
from slime.core import blame
from slime.core.errors import ActorDied, ActorFailed, ConfigError
from slime.core.processes import RUN_ID_ENV
from slime.observability.progress import StartUp
from slime.serving.server import engine_phase
from slime.training.state import checkpoint
from tests.support.rollout import rollout_args


@pytest.mark.parametrize("step", [["--ckpt-step", "3"], ["--ckpt_step", "3"], ["--ckpt_step=3"]])
def test_the_resume_command_loads_into_the_same_folder_and_repeats_the_rest(step: list[str]) -> None:
    words = ["slime", "train", "--lr", "1e-5", "--load=old", "--finetune", "--run_dir", "a b", *step, "--colocate"]
    words += ["--eval-prompt-data", "x", "y.jsonl", "--wandb-key", "abc"]
    command = shlex.split(resume_command(words, load="save", run_dir="a b"))
    assert command[:5] == ["slime", "train", "--lr", "1e-5", "--colocate"]
    assert command[5:8] == ["--eval-prompt-data", "x", "y.jsonl"]
    assert command[-4:] == ["--load", "save", "--run-dir", "a b"] and command.count("--load") == 1
    assert "abc" not in command and "--finetune" not in command and not any("3" in word for word in command)


def run_args(**given: Any) -> Any:
    usual = {
        "debug_rollout_only": False,
        "num_rollout": 5,
        "save": None,
        "run_dir": "runs/a",
        "command": ("slime", "train"),
        "load": None,
        "start_rollout_id": None,
        "was_given": lambda name: False,
    }
    return SimpleNamespace(**{**usual, **given})


def test_what_can_be_resumed_is_told_and_nothing_else(tmp_path: Path) -> None:
    assert "--save is not set" in how_to_resume(run_args(), stopped=True)
    assert "no checkpoint" in how_to_resume(run_args(save=str(tmp_path)), stopped=True)
    assert how_to_resume(run_args(), stopped=False) == "", "an error has something else to tell"
    parts = checkpoint.begin(tmp_path, 2)
    (parts / "part").write_text("x")
    checkpoint.commit(parts, 2)
    told = how_to_resume(run_args(save=str(tmp_path)), stopped=False)
    assert told.startswith("step_000002 is saved; to continue with step 3: slime train --load ")
    assert how_to_resume(run_args(save=str(tmp_path), num_rollout=3), stopped=True) == "", "the run was done"
    assert how_to_resume(run_args(debug_rollout_only=True), stopped=True) == ""


def test_a_run_stopped_before_its_first_checkpoint_says_whether_its_command_can_be_started_again(
    tmp_path: Path,
) -> None:
    """Law: what the last line promises is what the checks of the next start do."""
    save, metrics = str(tmp_path / "save"), tmp_path / "run" / "metrics.jsonl"
    flags = ["--save", save, "--no-apply-chat-template"]
    args = rollout_args(tmp_path, *flags)
    metrics.parent.mkdir()
    metrics.touch()
    assert how_to_resume(args, stopped=True).endswith("; the same command starts over with step 0")
    preflight(args)
    metrics.write_text('{"eval/step": -1}\n')
    assert "choose a new --run-dir or delete" in how_to_resume(args, stopped=True)
    with pytest.raises(ConfigError, match=r"but --save .* contains no checkpoint from which to continue; choose a new"):
        preflight(args)
    args = rollout_args(tmp_path, *flags, "--load", save)
    assert how_to_resume(args, stopped=True).endswith("; the same command starts over with step 0")
    preflight(args)


def test_an_error_in_a_users_function_is_one_sentence_with_its_line() -> None:
    """Law: what `ray.get` raises, which is an error of both kinds, loses Ray's words and keeps the place."""
    trace = (
        'Traceback (most recent call last):\n  File "/data/hooks.py", line 7, in loss\n    x["a"]\nKeyError: \'a\'\n'
    )
    error = RayTaskError("ray::TrainActor.train()", trace, KeyError("a")).as_instanceof_cause()
    translated = failures.translated(error, "training step 3")
    assert isinstance(translated, ActorFailed)
    assert str(translated) == "KeyError: 'a', raised at /data/hooks.py:7 in loss, during training step 3"
    ours = RayTaskError("ray::TrainActor.train()", trace, ActorDied("x died")).as_instanceof_cause()
    assert str(failures.translated(ours, "training step 3")) == "x died"


def test_ray_ending_a_process_for_memory_is_one_sentence() -> None:
    told = failures.translated(
        OutOfMemoryError("Task was killed due to the node running low on memory.\nTop 10:\n..."), "step 3"
    )
    assert isinstance(told, ActorDied)
    assert str(told).startswith("Ray killed a process during step 3 because memory ran out: Task was killed")
    assert "\n" not in str(told)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (exceptions.OutOfDiskError(), "OutOfDiskError: The object cannot be created because"),
        (exceptions.ObjectStoreFullError("it is full"), "ObjectStoreFullError: it is full"),
        (
            exceptions.ActorUnschedulableError("no node"),
            "ActorUnschedulableError: The actor is not schedulable: no node",
        ),
        (
            exceptions.RuntimeEnvSetupError("no pip"),
            "RuntimeEnvSetupError: Failed to set up runtime environment. no pip",
        ),
        (exceptions.RaySystemError("no core"), "RaySystemError: System error: no core"),
    ],
)
def test_what_ray_says_of_itself_is_no_death_of_a_process(error: exceptions.RayError, reason: str) -> None:
    told = failures.translated(error, "step 3")
    assert isinstance(told, ActorFailed)
    assert str(told).startswith(f"Ray: {reason}") and str(told).endswith(", during step 3"), told
    assert "\n" not in str(told)


@pytest.mark.parametrize("error", [exceptions.WorkerCrashedError(), exceptions.ActorDiedError()])
def test_a_process_that_is_gone_died(error: exceptions.RayError) -> None:
    told = failures.translated(error, "step 3")
    assert isinstance(told, ActorDied)
    assert str(told).startswith("a process on some host was killed or crashed during step 3")


CRASH = "I train_1 | step 3\nFatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File x"
LOGGED = "; its log is LOG"


@pytest.mark.parametrize(
    ("status", "log", "said"),
    [
        (3, None, "exited with code 3 during step 4"),
        (0, None, "exited with code 0 during step 4"),
        (-9, None, "was killed by SIGKILL during step 4"),
        (-11, None, "was killed by SIGSEGV during step 4"),
        (-64, None, "was killed by SIGRTMAX during step 4"),
        (-50, None, "was killed by signal 50 during step 4"),
        (None, None, "was killed or crashed during step 4"),
        (-9, "I train_1 | step 3\n", "was killed by SIGKILL during step 4" + LOGGED),
        (None, CRASH, "was killed or crashed during step 4" + LOGGED + ", which ends with:\n  Fatal Python error"),
    ],
)
def test_the_end_of_a_process_names_rank_host_signal_and_log(
    status: int | None, log: str | None, said: str, tmp_path: Path
) -> None:
    """Law: and no pid, which names nobody once the process is gone."""
    path = tmp_path / "train_1.log"
    if log is not None:
        path.write_text(log)
    process = blame.Process("training rank 1", "node7 (10.0.0.7)", path if log is not None else None)
    told = process.ended(status, during="step 4").replace(str(path), "LOG")
    whole = f"training rank 1 on node7 (10.0.0.7) {said}"
    assert told.startswith(whole) if log == CRASH else told == whole
    assert ("step 3" in told) is False, "what it did before it crashed is in the log"


def test_no_message_names_a_process_that_is_gone_by_its_pid() -> None:
    """Of those that live, or did: the report of memory, who holds a folder, and what stands still."""
    allowed = {"launch_run.py", "lease.py", "guardian.py", "stacks.py"}
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted((Path(failures.__file__).parents[1]).rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"\(?pid %d|\(pid \{|process \{[a-z_.]*pid\}", line) and path.name not in allowed
    ]
    assert not found, found


def test_memory_is_told_by_process_those_that_are_gone_included(monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = secrets.token_hex(6)
    hold = "import sys; held = bytearray(200 * 2**20); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold],
        env={**os.environ, RUN_ID_ENV: run_id},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        watch = MemoryWatch(run_id)
        (usage,) = [u for u in watch.look() if u.id.pid == child.pid]
        assert usage.rss_bytes > 200 * 2**20
        assert "did not kill any process" in watch.report() or "the kernel killed" in watch.report()
        child.kill()
    monkeypatch.setattr(launch_run, "num_oom_kills", lambda: (watch._before or 0) + 2)
    watch._before = watch._before or 0
    told = watch.report()
    assert "the kernel killed 2 processes during the run" in told and f"(pid {child.pid}, gone) 0.2 GiB" in told, told


def test_a_start_tells_what_is_ready_and_what_the_others_do(tmp_path: Path) -> None:
    ready: set[str] = set()
    notes: list[str] = []

    def ended(refs: Sequence[Any]) -> bool:
        return set(refs) <= ready

    def note(text: str) -> str:
        notes.append(text)
        return text

    log, startup = tmp_path / "engine_0.log", StartUp()
    waiting = [
        Waiting("engines", ["e"], "engines are up (1)"),
        Waiting("trainers", ["t"], "up"),
        Waiting("none", [], ""),
    ]
    progress = StartProgress(startup, waiting, began_s=0.0, note=note, engine_logs=[log], ended=ended)
    progress.tell()
    log.write_text("server_args=ServerArgs(...)\nInit torch distributed begin.\nLoad weight begin. avail mem=1 GB\n")
    ready.add("t")
    progress.tell()
    ready.add("e")
    progress.tell()
    assert notes == [
        "waiting for engines (importing SGLang), trainers",
        "waiting for engines (loading weights)",
        "",
    ]
    assert {"startup/engines_time", "startup/engine_import_time", "startup/trainers_time"} <= startup.end().keys()


def test_a_poll_reads_a_few_logs_and_every_log_in_its_turn(tmp_path: Path) -> None:
    logs = [tmp_path / f"engine_{index}.log" for index in range(3 * LOGS_PER_POLL)]
    notes: list[str] = []

    def note(text: str) -> str:
        notes.append(text)
        return text

    waiting = [Waiting("engines", ["e"], "engines are up")]
    progress = StartProgress(StartUp(), waiting, began_s=0.0, note=note, engine_logs=logs, ended=lambda refs: False)
    for log in logs:
        log.write_text("Load weight begin. avail mem=1 GB\n")
    for _ in range(3):
        progress.tell()
    assert notes == ["waiting for engines (importing SGLang, loading weights)"] * 2 + [
        "waiting for engines (loading weights)"
    ]


def test_a_starting_engine_does_what_its_log_named_last() -> None:
    """The lines are those of SGLang 0.5.16 and 0.5.23."""
    compiling = "compiling FP8 kernels, which takes minutes on a new host"
    lines = {
        "": "importing SGLang",
        "Load weight begin. avail mem=1 GB\n": "loading weights",
        "Load weight end. elapsed=1 s\n": "allocating its cache",
        "Try DeepGEMM JIT Compiling for <GEMM_NT_F8F8BF16> N=1\n": compiling,
        "Capture cuda graph begin. This can take up to several minutes.\n": "capturing CUDA graphs",
        "Try DeepGEMM JIT Compiling for <GEMM_NT_F8F8BF16> N=2\n": compiling,
        "Capture target CUDA graph begin. backend=full\n": "capturing CUDA graphs",
    }
    log = ""
    for line, phase in lines.items():
        log += line
        assert engine_phase(log) == phase
