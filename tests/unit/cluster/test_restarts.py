"""A run that a fault ended starts again by itself: after which ends, how often, and as what."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime.cluster.restarting import MOST_IN_VAIN, End, Restarts, StopRequest
from slime.core import errors
from slime.serving.child_process import read_stat
from slime.settings import parse_args
from tests.support.marks import quick

FAULT, MISTAKE = End("a rank died", is_fault=True), End("a bug", is_fault=False)


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (errors.ActorDied("a training rank died"), True),
        (errors.EngineError("engine 1 failed 3 times"), True),
        (errors.ClusterFailed("Ray: ObjectLostError"), True),
        (errors.DeadlineExceeded("nobody came"), True),
        (errors.RequestRejected("too long"), False),
        (errors.GroupsFailed("all of them"), False),
        (errors.ActorFailed("KeyError: 'x'"), False),
        (errors.ConfigError("no"), False),
        (errors.HookError("no"), False),
        (errors.DataError("no"), False),
        (errors.NumericsError("nan"), False),
        (errors.LedgerError("one is missing"), False),
        (errors.CheckpointError("damaged"), False),
        (errors.WeightSyncError("digests differ"), False),
        (RuntimeError("a bug"), False),
        (KeyboardInterrupt(), False),
        (SystemExit(143), False),
    ],
)
def test_a_fault_is_what_another_start_can_mend(error: BaseException, is_fault: bool) -> None:
    assert End.by(error).is_fault is is_fault


def test_faults_are_mended_as_often_as_asked_for() -> None:
    restarts = Restarts(3)
    assert [restarts.refusal(FAULT, step) for step in (0, 1, 2)] == [None] * 3 and restarts.number == 3
    assert restarts.refusal(FAULT, 3) == "all restarts are used up (--max-restarts 3)"


def test_other_ends_are_not_mended() -> None:
    assert Restarts(3).refusal(MISTAKE, 5) == "a restart would fail the same way"


def test_starts_that_train_nothing_new_are_given_up_early() -> None:
    restarts = Restarts(100)
    assert restarts.refusal(FAULT, 6) is None
    assert restarts.refusal(FAULT, 6) is None, "one in vain may be chance; it did steps 4 to 6 once more"
    said = restarts.refusal(FAULT, 4)
    assert said is not None and f"{MOST_IN_VAIN} launches in a row" in said and "a rank died" in said


def test_one_more_step_is_progress() -> None:
    restarts = Restarts(100, trained=6)  # a run that was resumed by hand
    for step in (6, 7, 7, 8, 7, 9):
        assert restarts.refusal(FAULT, step) is None, step


LOOP = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from slime.cluster import restarting as keeper
from slime.cluster.restarting import restarting, this_restart
from slime.core import errors
from slime.core.processes import RUN_ID_ENV
from slime.settings import run_or_exit

@restarting
def loop(args):
    run = Path(args.run_dir)
    run.mkdir(exist_ok=True)
    starts = run / "starts.jsonl"
    number = len(starts.read_text().splitlines()) if starts.exists() else 0
    restart = this_restart()
    orphan = [sys.executable, "-c", "import time; time.sleep(1.0)"]
    subprocess.Popen(orphan, start_new_session=True, env={**os.environ, RUN_ID_ENV: args.run_id})
    facts = {"pid": os.getpid(), "run_id": args.run_id, "load": args.load, "wandb": args.wandb_run_id}
    facts |= {"restart": restart and restart.facts(), "time": time.time(), "group": os.getpgrp()}
    facts |= {"hosts": args.actor_num_nodes, "gpus": args.rollout_num_gpus}
    with starts.open("a") as file:
        file.write(json.dumps(facts) + "\\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"train/step": number, "train/loss": 1.0, "time": time.time()}) + "\\n")
    step = Path(args.save) / f"step_{number:06d}"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text(json.dumps({"committed_ns": time.time_ns()}))
    (Path(args.save) / "latest.json").write_text(json.dumps({"path": step.name, "rollout_id": number}))
    args_of_loop[:] = [args]
    acts[min(number, len(acts) - 1)]()

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def fault():
    raise errors.ActorDied("a training rank (pid 1) died")

def mistake():
    raise errors.ConfigError("there is no such thing")

def two_hosts_left():
    error = errors.ConfigError("the run needs 3 hosts")
    error.num_hosts = 2
    raise error

def hang():
    time.sleep(600)

def until_asked():
    stop = keeper.stop_request()
    stop.listen(args_of_loop[0])
    print("listens", flush=True)
    while stop.reason(args_of_loop[0]) is None:
        time.sleep(0.01)
    raise errors.Unfinished(stop.code(args_of_loop[0]))

def ends_well():
    print("all is well")

keeper.PAUSE_S = 0.1
args_of_loop = []
acts = [globals()[name] for name in sys.argv.pop(1).split(",")]
run_or_exit(loop)
"""
"""A loop whose starts end as its first word says."""


@dataclass(frozen=True)
class Kept:
    """A run of the loop above that has ended."""

    code: int
    output: str
    starts: list[dict[str, object]]


class Script:
    """The loop above in a process of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        save = str(folder / "save")
        self.flags = [
            *("--hf-checkpoint", str(model), "--run-dir", str(folder / "run"), "--rollout-batch-size", "2"),
            *("--num-rollout", "9", "--n-samples-per-prompt", "2", "--data-source-path", "a.b", "--rm-type", "math"),
            *("--rollout-max-response-len", "8", "--save", save, "--load", save, "--save-interval", "1"),
        ]

    def start(self, acts: str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LOOP, acts, *self.flags, *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ended(self, process: subprocess.Popen[str]) -> Kept:
        output, _ = process.communicate(timeout=120)
        return Kept(process.returncode, output, self.starts())

    def run(self, acts: str, *more: str) -> Kept:
        return self.ended(self.start(acts, *more))

    def starts(self) -> list[dict[str, object]]:
        file = self.folder / "run" / "starts.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for(self, process: subprocess.Popen[str], holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert process.returncode is not None or process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "the loop did not get there"
            time.sleep(0.02)


@pytest.fixture
def script(tmp_path: Path, tiny_qwen3: Path) -> Script:
    return Script(tmp_path, tiny_qwen3)


def test_starts_follow_each_other_until_one_ends_well(script: Script) -> None:
    """Law: an error of ours and SIGKILL of the driver are mended alike; each start loads what the one before saved, in
    the same run folder, under another id, when nothing of the one before is left."""
    kept = script.run("fault,die,ends_well", "--max-restarts", "3", "--use-wandb")
    assert kept.code == 0, kept.output
    first, second, third = kept.starts
    assert first["load"] is None and second["load"] == third["load"] == str(script.folder / "save")
    assert len({start["run_id"] for start in kept.starts}) == 3, "the guardian of one ends no other"
    assert len({start["wandb"] for start in kept.starts}) == 1 and first["wandb"] == first["run_id"]
    assert [bool(start["restart"]) for start in kept.starts] == [False, True, True]
    assert (
        "restart 1 of 3: continues with step 1, from step_000000; the last launch failed with: ActorDied: a training"
        in kept.output
    )
    assert "2 of 3: continues with step 2, from step_000001; the last launch failed with: SIGKILL" in kept.output
    assert kept.output.count("all is well") == 1
    times = [float(str(start["time"])) for start in kept.starts]
    assert min(b - a for a, b in itertools.pairwise(times)) >= 1.0, "the orphan of a start was waited for"


def test_the_status_of_the_last_start_is_that_of_the_command(script: Script) -> None:
    kept = script.run("fault,mistake", "--max-restarts", "3")
    assert kept.code == 2 and len(kept.starts) == 2, kept.output
    assert "not restarted: a restart would fail the same way" in kept.output
    assert "ConfigError: there is no such thing" in kept.output


@pytest.mark.slow
def test_a_start_that_lacks_hosts_is_repeated_on_those_that_are_there(script: Script) -> None:
    """Law: engines that share the training GPUs shrink with them; after the next fault, all hosts are wanted again."""
    flags = ["--max-restarts", "3", "--ray-address", "127.0.0.1:1", "--actor-num-nodes", "3", "--colocate"]
    kept = script.run("fault,two_hosts_left,fault,ends_well", *flags, "--min-actor-num-nodes", "1")
    assert kept.code == 0, kept.output
    assert [(start["hosts"], start["gpus"]) for start in kept.starts] == [(3, 3), (3, 3), (2, 2), (3, 3)]
    assert "continues with step 2, from step_000001 on 2 training hosts, because no more are there" in kept.output


@pytest.mark.slow
def test_restarts_run_out(script: Script) -> None:
    kept = script.run("fault", "--max-restarts", "1")
    assert kept.code == 1 and len(kept.starts) == 2, kept.output
    assert "all restarts are used up (--max-restarts 1)" in kept.output


@pytest.mark.slow
def test_without_restarts_the_loop_is_this_process(script: Script) -> None:
    process = script.start("fault")
    kept = script.ended(process)
    assert kept.code == 1 and [start["pid"] for start in kept.starts] == [process.pid], kept.output


@pytest.mark.parametrize(
    ("number", "code"), quick([(signal.SIGINT, 130), (signal.SIGTERM, 143)], (signal.SIGTERM, 143))
)
def test_who_ends_the_command_ends_the_run(script: Script, number: signal.Signals, code: int) -> None:
    """Law: the start gets the signal once, though it is in a group of its own, and none follows."""
    process = script.start("hang", "--max-restarts", "3")
    script.wait_for(process, lambda: bool(script.starts()))
    process.send_signal(number)
    kept = script.ended(process)
    assert kept.code == code and len(kept.starts) == 1, kept.output
    assert ("interrupted" in kept.output) is (number is signal.SIGINT)


@pytest.mark.parametrize(
    ("number", "more"),
    quick(
        [
            (signal.SIGUSR1, ["--max-restarts", "3"]),
            (signal.SIGTERM, ["--max-restarts", "3", "--exit-signal-handler"]),
            (signal.SIGUSR1, []),
            (signal.SIGTERM, ["--exit-signal-handler"]),
        ],
        (signal.SIGTERM, ["--max-restarts", "3", "--exit-signal-handler"]),
    ),
)
def test_a_run_that_is_asked_to_stop_early_says_again(script: Script, number: signal.Signals, more: list[str]) -> None:
    """Law: the exit status is 75, with a keeper and without, and no start follows by itself."""
    process = script.start("until_asked,ends_well", *more)
    assert process.stdout is not None
    while "listens" not in (line := process.stdout.readline()):
        assert line, "the loop ended before it listened"
    process.send_signal(number)
    kept = script.ended(process)
    assert kept.code == errors.AGAIN == 75 and len(kept.starts) == 1, kept.output
    assert f"received {number.name}: the run stops after this step" in kept.output
    assert "stopped early and not complete (exit status 75)" in kept.output and "not restarted" not in kept.output


def test_the_minutes_of_a_run_are_those_since_its_first_start(script: Script) -> None:
    """Law: the request is due when its minutes are over, not before, and a signal needs none."""
    now = [1000.0]
    request = StopRequest(clock=lambda: now[0])
    args = parse_args([*script.flags, "--exit-duration-in-mins", "30"])
    assert request.reason(args) is None
    now[0] += 30 * 60 - 1
    assert request.reason(args) is None
    now[0] += 1
    assert request.reason(args) == "--exit-duration-in-mins 30" and request.code(args) == errors.AGAIN
    assert request.heard() is None, "before its first step, only a signal stops a launch"
    other = StopRequest()
    other.hear(signal.SIGUSR1)
    assert other.reason(args) == "SIGUSR1"
    again = StopRequest(clock=lambda: now[0])
    assert again.takes(signal.SIGTERM) and again.takes(signal.SIGTERM), "the keeper's echo comes at once"
    now[0] += 3
    assert not again.takes(signal.SIGTERM) and again.reason(args) == "SIGTERM", "the second one is meant"
    assert other.code(args.replace(save=None)) == 128 + signal.SIGUSR1, "nothing to go on from"


def test_no_start_outlives_its_keeper(script: Script) -> None:
    process = script.start("hang", "--max-restarts", "3")
    script.wait_for(process, lambda: bool(script.starts()))
    process.kill()
    process.wait()
    driver = int(str(script.starts()[0]["pid"]))
    script.wait_for(process, lambda: (stat := read_stat(driver)) is None or stat.state in "ZX")
    assert process.stdout is not None
    process.stdout.close()
    assert driver != os.getpid()
