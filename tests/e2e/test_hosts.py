"""Runs over several hosts, on a Ray cluster that was there before them. The hosts are namespaces (`tests.support.hosts`).

Daemons of the clusters know nothing of a run: what its processes need has to reach them by name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.test_loops import MAX_MISMATCH
from tests.support.e2e import Flags
from tests.support.hosted_run import HostedRun
from tests.support.hosts import FakeCluster, ray_cluster, why_no_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made"),
]
CONSTANT_LR = ["--lr", "2e-2", "--lr-decay-style", "constant"]
STEPS = 2
SMALL = ["--rollout-batch-size", "4", "--num-rollout", str(STEPS)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path, tasks: Path) -> Path:
    """The folder that all hosts see: model, tasks, run folders."""
    folder = tmp_path_factory.mktemp("shared")
    shutil.copytree(tiny_qwen3, folder / "model")
    shutil.copytree(tasks, folder / "tasks")
    return folder


@pytest.fixture(scope="module")
def two(shared: Path) -> Iterator[FakeCluster]:
    """Two hosts of one slot each."""
    with ray_cluster(shared, [1, 1]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def flags(digits: Callable[[Path], Flags], shared: Path, tasks: Path) -> Flags:
    """GRPO on digits, two steps, with everything below the shared folder."""
    moved = [str(word).replace(str(tasks), str(shared / "tasks")) for word in digits(shared / "model")]
    return [*moved, *SMALL, *CONSTANT_LR]


def finished(run: HostedRun) -> None:
    """The run succeeded, engine and trainer agree, and nothing of it is left on any host."""
    status = run.wait()
    assert status == 0, f"exit status {status}; {run.tail}"
    gaps = [
        value
        for kind, name in (("train", "train/train_rollout_logprob_abs_diff_max"),)
        for value in (row.get(name) for row in run.metrics(kind).values())
        if value is not None
    ]
    assert gaps and max(gaps) <= 10 * MAX_MISMATCH, gaps
    assert sorted(run.metrics("train")) == list(range(STEPS))
    assert run.left_on_hosts() == []


def test_trainer_and_engine_on_two_hosts(two: FakeCluster, shared: Path, flags: Flags) -> None:
    """Law: one host trains, the other serves; every weight sync is verified; both are empty afterwards."""
    more = ["--save", str(shared / "save-apart"), "--save-interval", "2"]
    with HostedRun(two, shared / "apart", [*flags, *more]) as run:
        finished(run)
        one, other = two.hosts
        log = (run.run_dir / "logs" / "driver.log").read_text()
        assert f"{one.address}) has training ranks [0], the rollout side" in log, log
        assert f"{other.address}) has engines [0]" in log and "processes of this run listen on" in log
        assert f"http://{other.address}:" in (run.run_dir / "logs" / "engine_0.log").read_text() or (
            f"--host {other.address}" in (run.run_dir / "logs" / "engine_0.log").read_text()
        )
        assert json.loads((run.run_dir / "args.json").read_text())["update_weight_transport"] == "distributed"


def test_driver_killed(two: FakeCluster, shared: Path, flags: Flags) -> None:
    """Law: SIGKILL of the driver ends the run on every host: no process, port, shared-memory file, temporary folder."""
    before = [host.ports() for host in two.hosts]
    with HostedRun(two, shared / "killed", [*flags, "--num-rollout", "1000"]) as run:
        run.wait_until("the first step", lambda: 0 in run.metrics("train"))
        assert all(run.left_now(host) for host in two.hosts), "the watcher sees the run on both hosts"
        run.kill()
        assert run.left_on_hosts() == []
    assert [host.ports() - ports for host, ports in zip(two.hosts, before, strict=True)] == [set(), set()]
