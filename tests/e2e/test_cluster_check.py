"""Law: `slime doctor --ray-address` names each host of a cluster that is not like the others, and what is wrong there.

The hosts are namespaces (`tests.support.hosts`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.e2e import ROOT, environment
from tests.support.hosts import FakeCluster, FakeHost, ray_cluster, why_no_hosts

NO_HOSTS = why_no_hosts()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "there are hosts")]
CHECK_LIMIT_S = 300.0
GONE_LIMIT_S = 60.0
"""Ray ends the actors of a job that is over."""
OTHER_TORCH = """
mkdir -p /tmp/more/torch-1.2.3.dist-info /tmp/only-here
printf 'Metadata-Version: 2.1\\nName: torch\\nVersion: 1.2.3\\n' > /tmp/more/torch-1.2.3.dist-info/METADATA
"""


def doctor(cluster: FakeCluster, *words: str | Path, **variables: str) -> tuple[int, str]:
    """Exit status and output of `slime doctor` on the first host."""
    command = [sys.executable, "-m", "slime", "doctor", "--ray-address", cluster.address, *map(str, words)]
    done = subprocess.run(
        cluster.hosts[0].command(command),
        env={**environment(), "PYTHONPATH": str(ROOT), **cluster.environment, **variables},
        capture_output=True,
        text=True,
        timeout=CHECK_LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def row_of(output: str, host: FakeHost) -> list[str]:
    """Cells of the host's row in the table."""
    (row,) = (line for line in output.splitlines() if line.startswith(host.name))
    return re.split(r"  +", row)


def test_a_cluster_without_a_fault_and_one_with_a_host_that_is_wrong(tmp_path: Path) -> None:
    """Law: no problem is found where there is none. Then a host with another torch, without a folder, is named with
    both, and nothing of the check is left."""
    shared = tmp_path / "runs"
    shared.mkdir()
    with ray_cluster(tmp_path, [1, 1]) as cluster:
        first, other = cluster.hosts
        status, said = doctor(cluster, "--shared", shared)
        assert status == 0, said
        assert said.splitlines()[-1] == "this cluster can run slime", said
        for host in cluster.hosts:
            name, address, versions, folders, clock, gpus, bandwidth = row_of(said, host)
            assert (name, address, versions, gpus) == (host.name, host.address, "same", "none"), said
            assert f"{shared} " in folders and "GiB free" in folders, said
            assert abs(float(clock.removesuffix(" s"))) < 1.0, "the hosts have one clock"
            assert float(re.fullmatch(r"gloo between hosts ([\d.]+) GB/s", bandwidth)[1]) > 0, said  # type: ignore[index]
        assert re.search(r"all-reduce over all hosts \(gloo\): [\d.]+ GB/s", said), said

        other.run(["bash", "-c", OTHER_TORCH.replace("/tmp/only-here", "")])
        first.run(["bash", "-c", "mkdir -p /tmp/more /tmp/only-here"])
        status, said = doctor(cluster, "--shared", shared, "--shared", "/tmp/only-here", PYTHONPATH=f"{ROOT}:/tmp/more")
        assert status == 1, said
        other_host = f"{other.name} ({other.address})"
        assert f"FAIL  {other_host}: has torch 1.2.3, but the environment of slime doctor has torch " in said, said
        assert f"FAIL  {other_host}: does not see --shared 2: /tmp/only-here (No such file or directory)" in said, said
        assert f"FAIL  {first.name}" not in said, "only the one that is wrong"
        assert row_of(said, other)[2] == "other torch" and row_of(said, first)[2] == "same", said
        assert "this cluster has 2 problems" in said.splitlines()[-1], said
        assert list(shared.iterdir()) == [], "the check removes its files"
        until_s = time.monotonic() + GONE_LIMIT_S
        while left := [pid for host in cluster.hosts for pid in host.pids_of("ray::Checker")]:
            assert time.monotonic() < until_s, f"{left} are left on the hosts"
            time.sleep(0.1)


def test_a_host_that_cannot_reach_the_others_ports_is_a_problem_of_the_pair(tmp_path: Path) -> None:
    """Law: a process group that cannot be formed is reported with both hosts, and the rest of the table is there."""
    with ray_cluster(tmp_path, [1, 1]) as cluster:
        status, said = doctor(cluster, "--shared", tmp_path, GLOO_SOCKET_IFNAME="nowhere0")
    first, other = (f"{host.name} ({host.address})" for host in cluster.hosts)
    assert status == 1, said
    assert f"the all-reduce on {first} and {other} (gloo between hosts) failed: " in said, said
    assert "GLOO_SOCKET_IFNAME" in said and row_of(said, cluster.hosts[1])[2] == "same", said


def test_an_address_without_a_cluster_is_refused() -> None:
    words = [sys.executable, "-m", "slime", "doctor", "--ray-address", "127.0.0.1:9"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=CHECK_LIMIT_S, check=False)
    assert done.returncode == 2 and "no Ray cluster can be reached at --ray-address 127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr, os.linesep + done.stderr
