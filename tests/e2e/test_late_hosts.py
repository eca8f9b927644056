"""Laws of hosts that are not there yet: a run waits for them, at its start and when it restarts; one with other
versions is named.

The hosts are namespaces (`tests.support.hosts`), and each training rank is on one of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recipes.tiny.tasks import SFT_FILE
from tests.e2e.test_restarts import starts_of
from tests.support.e2e import NUM_STEPS, Flags, latest_step, sums_task
from tests.support.hosted_run import HostedRun
from tests.support.hosts import PORT, FakeCluster, FakeHost, network_of_hosts, why_no_hosts
from tests.support.ledger import require_balance

NO_HOSTS = why_no_hosts()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "there are hosts")]
WAITS = "waiting for hosts, at most"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path, tasks: Path) -> Path:
    """The folder that all hosts see."""
    folder = tmp_path_factory.mktemp("shared")
    shutil.copytree(tiny_qwen3, folder / "model")
    shutil.copytree(tasks, folder / "tasks")
    return folder


@pytest.fixture
def flags(shared: Path) -> Flags:
    """Fine-tuning, which needs no engine, with one rank on each of two hosts."""
    return [*sums_task(shared / "model", shared / "tasks" / SFT_FILE), "--actor-num-nodes", "2"]


@contextmanager
def half_a_cluster(shared: Path) -> Iterator[tuple[FakeCluster, FakeHost]]:
    """A cluster of one host, and a second host without Ray."""
    with network_of_hosts(shared, 2) as hosts:
        variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64, "RAY_worker_niceness": "0"}
        for host in hosts:
            host.environment = variables
        hosts[0].start_ray(1)
        yield FakeCluster(hosts, f"{hosts[0].address}:{PORT}", variables), hosts[1]


def test_a_host_that_joins_late_is_waited_for(shared: Path, flags: Flags) -> None:
    """Law: the run says what is missing, and starts once it is there. Without --cluster-wait-s it is refused."""
    with half_a_cluster(shared) as (cluster, late):
        with HostedRun(cluster, shared / "refused", [*flags, "--num-rollout", "4"]) as run:
            assert run.wait() == 2, run.tail
            assert "need 2 hosts with 1 free slots each" in run.output and "--cluster-wait-s" in run.output, run.tail
        with HostedRun(cluster, shared / "late", [*flags, "--num-rollout", "4", "--cluster-wait-s", "300"]) as run:
            run.wait_until("the wait", lambda: WAITS in run.output)
            late.start_ray(1, head=cluster.address)
            assert run.wait() == 0, run.tail
            assert sorted(run.metrics("train")) == [0, 1, 2, 3]


def test_a_restart_waits_for_the_host_that_was_lost(shared: Path, flags: Flags) -> None:
    """Law: with --max-restarts, a host that is replaced after the fault is waited for, and each step is trained once
    for the ledger."""
    save = shared / "save"
    saving: Flags = ["--save", save, "--load", save, "--save-interval", "1", "--max-restarts", "4"]
    with half_a_cluster(shared) as (cluster, other):
        other.start_ray(1, head=cluster.address)
        with HostedRun(cluster, shared / "restarted", [*flags, *saving]) as run:
            run.wait_until("a checkpoint", lambda: latest_step(save) >= 1)
            other.kill("raylet/raylet")
            run.wait_until("the wait", lambda: WAITS in run.output)
            other.start_ray(1, head=cluster.address)
            assert run.wait() == 0, run.tail
        assert sorted(run.metrics("train")) == list(range(NUM_STEPS))
        require_balance(run.metrics("train"))
        assert len(starts_of(run)) >= 2 and "restart 1 of 4: continues with step" in run.output, run.tail


def test_a_host_with_another_version_is_named_with_it(shared: Path, flags: Flags) -> None:
    """Law: before any engine or rank starts, the error names the host, the package and both versions."""
    import torch

    with half_a_cluster(shared) as (cluster, other):
        for host, is_other in zip(cluster.hosts, (False, True), strict=True):
            lines = ["mkdir -p /tmp/more/torch-1.2.3.dist-info"] if is_other else ["mkdir -p /tmp/more"]
            metadata = "Metadata-Version: 2.1\\nName: torch\\nVersion: 1.2.3\\n"
            lines += [f"printf '{metadata}' > /tmp/more/torch-1.2.3.dist-info/METADATA"] * is_other
            host.run(["bash", "-c", " && ".join(lines)])
        other.start_ray(1, head=cluster.address)
        with HostedRun(cluster, shared / "versions", flags, more_env={"PYTHONPATH": "/tmp/more"}) as run:
            assert run.wait() == 2, run.tail
        said = f"{other.name} ({other.address}) has torch 1.2.3, but the driver's host {cluster.hosts[0].name} "
        assert said + f"({cluster.hosts[0].address}) has torch {torch.__version__}" in run.output, run.tail


def test_a_restart_goes_on_with_the_hosts_that_are_left(shared: Path, flags: Flags) -> None:
    """Law: with --min-actor-num-nodes, a host that does not come back costs a data-parallel replica, not the run."""
    save = shared / "fewer"
    saving: Flags = ["--save", save, "--load", save, "--save-interval", "1", "--max-restarts", "4"]
    fewer: Flags = ["--restart-wait-s", "5", "--min-actor-num-nodes", "1"]
    with half_a_cluster(shared) as (cluster, other):
        other.start_ray(1, head=cluster.address)
        with HostedRun(cluster, shared / "on_one", [*flags, *saving, *fewer]) as run:
            run.wait_until("a checkpoint", lambda: latest_step(save) >= 1)
            other.kill("raylet/raylet")
            assert run.wait() == 0, run.tail
        assert "on 1 training hosts, because no more are there" in run.output, run.tail
        assert sorted(run.metrics("train")) == list(range(NUM_STEPS))
