"""A process that stands still is named: who waits for whom, in which collective, on which host, at which line."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from recipes.tiny.tasks import SFT_FILE
from slime.cluster.hang_doctor import STOPPED_S
from slime.observability.stacks import standing_of
from tests.e2e.test_restarts import starts_of, training_ranks
from tests.support.e2e import Flags, RealRun, latest_step, sums_task
from tests.support.faults import WORKER, hit, victim_of
from tests.support.hosted_run import HostedRun
from tests.support.hosts import ray_cluster, why_no_hosts
from tests.unit.observability.test_alerts import Hook

pytestmark = pytest.mark.slow

NO_HOSTS = why_no_hosts()
NAMED_WITHIN_S = 60.0
HOST = re.escape(socket.gethostname())
LINE = r"\S+\.py:\d+ in \w+"
STANDS_IN = """
import sys
from slime.observability.stacks import standing_of
print(standing_of(int(sys.argv[1]), "rank 1").collective)
"""
CONSTANT_LR: Flags = ["--lr", "1e-3", "--lr-decay-style", "constant"]


def named(run: RealRun | HostedRun, pattern: str) -> re.Match[str]:
    """The sentence about the hang, which must come in time."""
    began = time.monotonic()
    run.wait_until("the sentence", lambda: re.search(pattern, run.output) is not None, NAMED_WITHIN_S)
    print(f"named after {time.monotonic() - began:.1f} s")
    found = re.search(pattern, run.output)
    assert found is not None
    return found


def stop_in_a_collective(ranks: Sequence[int], waits: Callable[[], bool]) -> None:
    """Stops rank 1 while it waits for rank 0 in a collective, which `waits` knows.

    Rank 0 may be stopped where rank 1 waits for it elsewhere, so it continues before anybody calls it a hang.
    """
    for _ in range(100):
        os.kill(ranks[0], signal.SIGSTOP)
        try:
            deadline = time.monotonic() + STOPPED_S / 2
            while time.monotonic() < deadline:
                if waits():
                    os.kill(ranks[1], signal.SIGSTOP)
                    return
        finally:
            os.kill(ranks[0], signal.SIGCONT)
        time.sleep(0.7)  # another moment of a step
    raise AssertionError("rank 1 was never seen in a collective")


def own_pid(pid: int) -> str:
    """The number of a process in its own namespace."""
    (line,) = (one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("NSpid:"))
    return line.split()[-1]


def test_a_rank_that_is_stopped_in_a_collective_is_named_and_the_run_restarts(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> None:
    """Law: rank, host and line within a minute; after the limit the run goes on from its checkpoint by itself."""
    save = runs / "hang-save"
    flags = [*digits(tiny_qwen3), *CONSTANT_LR, "--actor-num-gpus-per-node", "2", "--num-rollout", "100000"]
    flags += ["--save", save, "--load", save, "--save-interval", "1", "--max-restarts", "1", "--hang-limit-s", "20"]
    with Hook() as hook, RealRun(runs / "hang", [*flags, "--alert-webhook", hook.url]) as run:
        run.wait_until("a checkpoint", lambda: latest_step(save) >= 1)
        ranks = training_ranks(str(starts_of(run)[0]["run_id"]))
        stop_in_a_collective(ranks, lambda: standing_of(ranks[1], "rank 1").collective is not None)
        sentence = named(
            run,
            rf"hang: .*training rank 0 on {HOST} waits in ([\w ]+) at {LINE} for training rank 1 on {HOST} .*: "
            rf"training rank 1 on {HOST} is stopped \(state T; kill -CONT {ranks[1]} continues it\) in (.+) at {LINE}",
        )
        assert sentence[1] and sentence[2], sentence[0]
        report = (run.run_dir / "logs" / "hang_001.txt").read_text()
        assert "training rank 0 on" in report and "training rank 1 on" in report and "distributed_c10d.py" in report
        run.wait_until("a restart", lambda: "restart 1 of 1: continues with step" in run.output, 120)
        before = latest_step(save)
        run.wait_until("a new checkpoint", lambda: latest_step(save) > before, 240)
        assert run.interrupt() == 130, run.tail
        assert "training rank 1 on" in str(starts_of(run)[1]["restart"])
        assert [one["kind"] for one in hook.received if one["kind"] != "truncation"] == ["hang", "failed", "restart"]
        assert any("for training rank 1 on" in one["text"] for one in hook.received if one["kind"] == "hang")
        assert run.left() == []
        hook.shutdown()


def test_a_rollout_worker_that_is_stopped_is_named_and_replaced(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> None:
    """Law: the worker, its host and its line within a minute; then another one does its work, and no prompt is lost."""
    flags = [*digits(tiny_qwen3), *CONSTANT_LR, "--rollout-num-workers", "2", "--num-rollout", "100000"]
    with RealRun(runs / "hang-worker", flags) as run:

        def steps() -> int:
            return max(run.metrics("train"), default=-1) if (run.run_dir / "metrics.jsonl").exists() else -1

        run.wait_until("step 1", lambda: steps() >= 1)
        hit(victim_of(run, WORKER, 1), signal.SIGSTOP)
        named(
            run, rf"hang: .*rollout worker \d on {HOST} is stopped \(state T; kill -CONT \d+ continues it\) at {LINE}"
        )
        after = steps()
        run.wait_until("two steps more", lambda: steps() >= after + 2, 120)
        assert "died, restarting it" in (run.run_dir / "logs" / "rollout.log").read_text()
        assert run.interrupt() == 130, run.tail
        assert run.left() == []


@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "there are hosts")
def test_a_rank_that_is_stopped_on_another_host_is_named_with_that_host_and_can_be_continued(
    tmp_path: Path, tasks: Path, tiny_qwen3: Path
) -> None:
    """Law: rank, host and line within a minute. The command in the sentence, entered on that host, ends the hang, the
    run says so, and goes on."""
    shutil.copytree(tiny_qwen3, tmp_path / "model")
    shutil.copytree(tasks, tmp_path / "tasks")
    flags = sums_task(tmp_path / "model", tmp_path / "tasks" / SFT_FILE, num_steps=1_000_000)
    with (
        ray_cluster(tmp_path, [1, 1]) as cluster,
        HostedRun(cluster, tmp_path / "run", [*flags, "--actor-num-nodes", "2"]) as run,
    ):
        here, there = (re.escape(host.name) for host in cluster.hosts)
        run.wait_until("step 1", lambda: max(run.metrics("train"), default=-1) >= 1)
        ranks = training_ranks(str(starts_of(run)[0]["run_id"]))
        look = [sys.executable, "-c", STANDS_IN, own_pid(ranks[1])]
        stop_in_a_collective(ranks, lambda: cluster.hosts[1].run(look).strip() != "None")
        sentence = named(
            run,
            rf"hang: .*training rank 0 on {here} waits in [\w ]+ at {LINE} for training rank 1 on {there} .*: "
            rf"training rank 1 on {there} is stopped \(state T; kill -CONT (\d+) continues it\) in [\w ]+ at {LINE}",
        )
        assert sentence[1] == own_pid(ranks[1]), "the host's own number of the process"
        report = (run.run_dir / "logs" / "hang_001.txt").read_text()
        assert f"training rank 1 on {cluster.hosts[1].name}" in report
        before = max(run.metrics("train"))
        cluster.hosts[1].run(["bash", "-c", f"kill -CONT {sentence[1]}"])
        run.wait_until("the end of the hang", lambda: "it moves again after" in run.output, 60)
        run.wait_until("more steps", lambda: max(run.metrics("train")) > before + 1, 120)
        assert run.interrupt() == 130, run.tail
        assert run.left_on_hosts() == []
