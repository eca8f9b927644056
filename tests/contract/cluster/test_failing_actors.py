"""Real Ray: whatever ends a call to an actor is one sentence of ours that says what, where and who."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from slime.core.processes import RUN_ID_ENV, new_run_id

pytestmark = pytest.mark.slow

DRIVER = """
import ctypes, json, os, signal, sys, threading, time, types
from pathlib import Path
from slime.cluster.preflight import cluster_problems
from slime.cluster.launch_run import prepare_environment

run_id, folder = sys.argv[1], Path(sys.argv[2])
prepare_environment(run_id)
import ray
from slime.cluster.ray_session import RaySession, guarded
from slime.cluster.waiting import followed_by, introduce, peek, wait_for
from slime.core.blame import Process
from slime.core.errors import DataError, Terminated
from slime.core.registry import load_object
from slime.observability.logs import setup_logging

@ray.remote(max_restarts=0, num_cpus=0)
class TrainActor:
    def __init__(self, refuses=False, log=None):
        if log is not None:
            setup_logging(Path(log), crashes=True)
        if refuses:
            raise DataError("got a file of nothing;\\n  give one with rows")
    def user(self, path):
        return load_object(path)({})
    def ours(self):
        raise DataError("got this, because of that; do better")
    def crash(self):
        ctypes.string_at(0)
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)
    def pid(self):
        return os.getpid()
    def wait(self):
        time.sleep(600)

def told(*refs):
    try:
        wait_for(refs, for_what="training step 3", limit_s=120)
    except Exception as error:
        return [type(error).__name__, str(error), str(error.__cause__)]

guardian = guarded(run_id, log_path=folder / "guardian.log", own_ray=True)
with guardian, RaySession(run_id, num_cpus=1, num_gpus=0):
    def rank(number):
        log = folder / f"train_{number}.log"
        return introduce(TrainActor.remote(log=str(log)), Process(f"training rank {number}", "node", log))
    actor, crashing, other, stranger = rank(7), rank(8), TrainActor.remote(), TrainActor.remote()
    wait_for([actor.pid.remote()], for_what="a pid", limit_s=120)[0]
    out = {"log": str(folder / "train_7.log"), "ours": told(other.ours.remote())}
    out["user"] = told(other.user.remote(str(folder / "hooks.py") + ":loss"))
    out["died"] = told(actor.die.remote())
    out["crashed"] = told(crashing.crash.remote())
    out["stranger"] = told(stranger.die.remote())
    out["gone"] = told(actor.pid.remote())
    out["both"] = told(crashing.pid.remote(), actor.pid.remote())
    out["peek"] = peek(actor.pid.remote())
    followed, end_s = [], time.monotonic() + 2.0
    with followed_by(followed.append):
        while time.monotonic() < end_s:
            wait_for([other.pid.remote()], for_what="a pid", limit_s=120)
    out["followed"] = followed
    out["refused"] = told(TrainActor.remote(True).pid.remote())
    head = types.SimpleNamespace(
        ray_address=ray.get_runtime_context().gcs_address, was_given=lambda name: True, cluster_wait_s=0.0
    )
    out["cluster"] = list(cluster_problems(head))

def terminated():
    with guarded(run_id, log_path=folder / "guardian.log", own_ray=True), RaySession(run_id, num_cpus=1, num_gpus=0):
        slow = TrainActor.remote()
        wait_for([slow.pid.remote()], for_what="a pid", limit_s=120)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        wait_for([slow.wait.remote()], for_what="nothing", limit_s=120)

try:
    terminated()
except Terminated as end:
    out["terminated"] = end.code
print(json.dumps(out))
"""
HOOKS = """
def loss(batch):
    return helper(batch)


def helper(batch):
    return batch["advantages"]
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """(class, message, text of the cause) of each failure, as a driver saw it."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "hooks.py").write_text(HOOKS)
    own = {k: v for k, v in os.environ.items() if k not in (RUN_ID_ENV, "RAY_ADDRESS")}
    (temporary := folder / "where-temporary-files-go").mkdir()
    own["TMPDIR"] = str(temporary)  # too long a path for the sockets of Ray
    command = [sys.executable, "-c", DRIVER, new_run_id(), str(folder)]
    ended = subprocess.run(command, env=own, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return {**found, "folder": [str(folder)]}


def test_a_users_function_is_shown_with_its_file_and_line(told: dict[str, Any]) -> None:
    """Law: one sentence with the user's own line; Ray's text and the whole trace stay behind it."""
    kind, message, cause = told["user"]
    place = f"{told['folder'][0]}/hooks.py:7 in helper"
    assert (kind, message) == ("ActorFailed", f"KeyError: 'advantages', raised at {place}, during training step 3")
    assert 'hooks.py", line 7, in helper' in cause


def test_an_error_of_ours_arrives_as_it_was_raised(told: dict[str, Any]) -> None:
    assert told["ours"][:2] == ["DataError", "got this, because of that; do better"]
    assert told["refused"][:2] == ["DataError", "got a file of nothing;\n  give one with rows"], "from a constructor"


def test_a_process_that_was_killed_is_named(told: dict[str, Any]) -> None:
    for case in ("died", "gone", "both"):  # both: a rank that crashed is asked first, as a peer that lost it would be
        kind, message, _ = told[case]
        assert (kind, message) == (
            "ActorDied",
            f"training rank 7 on node was killed or crashed during training step 3; its log is {told['log']}",
        )
    kind, message, _ = told["crashed"]
    assert message.startswith("training rank 8 on node was killed or crashed during training step 3; its log is ")
    assert "which ends with:\n  Fatal Python error: Segmentation fault" in message
    assert told["stranger"][1].startswith("TrainActor on 127.0.0.1 was killed or crashed during"), told["stranger"]
    assert told["peek"] is None


def test_the_head_of_a_cluster_is_known_from_another_server(told: dict[str, Any]) -> None:
    assert told["cluster"] == []


def test_a_follower_is_called_twice_a_second_even_if_each_wait_is_shorter(told: dict[str, Any]) -> None:
    """Law: a run of short steps is watched like one of long steps."""
    assert len(told["followed"]) >= 2 and set(told["followed"]) == {"a pid"}


def test_sigterm_while_the_driver_waits_is_its_exit_code(told: dict[str, Any]) -> None:
    """Ray turns what a signal raises during a wait into an exit with code 1 and no word."""
    assert told["terminated"] == 143
