"""Runs over several hosts, on a Ray cluster that was there before them (`tests.support.hosts`).

Daemons of the clusters know nothing of a run: what its processes need has to reach them by name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from slime.serving.child_process import read_stat
from tests.e2e.test_loops import LOUDNESS, MAX_MISMATCH
from tests.support.e2e import Flags, latest_step
from tests.support.fault_storm import require_exact, storm_flags
from tests.support.host_storm import SIGNALS, SIZES, host_storm
from tests.support.hosted_run import HostedRun
from tests.support.hosts import FakeCluster, ray_cluster, why_no_hosts
from tests.support.ledger import require_balance

NO_HOSTS = why_no_hosts()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "there are hosts")]
STEPS = 2
RAYS = ("ray::", "raylet", "gcs_server", "python", "Ray's metrics")
"""Processes that listen on every interface, where Ray serves several hosts: gRPC asks for the cluster's token."""
SMALL = ["--rollout-batch-size", "4", "--num-rollout", str(STEPS), "--lr", "2e-2", "--lr-decay-style", "constant"]
ASK = """
import sys, urllib.error, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    print(opener.open(sys.argv[1], timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""
"""Asks an engine without the key of the run."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path, tasks: Path) -> Path:
    """The folder that all hosts see: model, tasks, run folders."""
    folder = tmp_path_factory.mktemp("shared")
    shutil.copytree(tiny_qwen3, folder / "model")
    shutil.copytree(tasks, folder / "tasks")
    return folder


@pytest.fixture(scope="module")
def two(shared: Path) -> Iterator[FakeCluster]:
    """A host of one slot and a host of two: one rank trains on the first, and engines are on the second."""
    with ray_cluster(shared, [1, 2]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three(shared: Path) -> Iterator[FakeCluster]:
    """Three hosts of one slot: whatever takes two slots is on two hosts."""
    with ray_cluster(shared, [1, 1, 1]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def flags(digits: Callable[[Path], Flags], shared: Path, tasks: Path) -> Flags:
    """GRPO on digits, two steps, with everything below the shared folder."""
    moved = [str(word).replace(str(tasks), str(shared / "tasks")) for word in digits(shared / "model")]
    return [*moved, *SMALL]


def finished(run: HostedRun) -> None:
    """The run succeeded, its engines agreed with its trainer, and nothing of it is left on any host."""
    status = run.wait()
    assert status == 0, f"exit status {status}; {run.tail}"
    assert sorted(run.metrics("train")) == list(range(STEPS))
    require_agreement(run)
    assert run.left_on_hosts() == []
    assert "A worker died" not in run.tail, run.tail


def require_agreement(run: HostedRun) -> None:
    """Trainer and engines compute the same log-probs, in every step."""
    rows = [*run.metrics("train").values(), *run.metrics("perf").values()]
    names = ("train/train_rollout_logprob_abs_diff_max", "probe/train_rollout_logprob_abs_diff_max")
    gaps = [row[name] for row in rows for name in names if name in row]
    assert len(gaps) >= STEPS and max(gaps) <= LOUDNESS * MAX_MISMATCH, gaps


def command_of(run: HostedRun, engine: int | str) -> str:
    """How an engine was started. `engine`: its number, or the name of one of its servers."""
    return (run.run_dir / "logs" / f"engine_{engine}.log").read_text().splitlines()[0]


def port_of(run: HostedRun, engine: int | str) -> str:
    found = re.search(r"--port (\d+)", command_of(run, engine))
    assert found is not None, command_of(run, engine)
    return found[1]


def test_trainer_and_engine_on_two_hosts(two: FakeCluster, shared: Path, flags: Flags) -> None:
    """Law: one host trains, the other serves; every weight sync is verified; both are empty afterwards."""
    one, other = two.hosts
    with HostedRun(two, shared / "apart", flags) as run:
        finished(run)
    log = (run.run_dir / "logs" / "driver.log").read_text()
    assert f"({one.address}) has training ranks [0], the rollout side" in log, log
    assert f"({other.address}) has engines [0]" in log and "processes of this run listen on" in log
    assert f"--host {other.address} " in command_of(run, 0)
    assert json.loads((run.run_dir / "args.json").read_text())["update_weight_transport"] == "distributed"


def test_hosts_that_have_ipv6_alone(shared: Path, flags: Flags) -> None:
    """Law: trainer and engine on two hosts without IPv4 between them: Ray, weight sync and requests go over IPv6."""
    with ray_cluster(shared, [1, 2], version=6) as cluster:
        one, other = cluster.hosts
        with HostedRun(cluster, shared / "ipv6", flags) as run:
            finished(run)
    assert cluster.address == f"[{one.address}]:6379" and ":" in other.address
    log = (run.run_dir / "logs" / "driver.log").read_text()
    assert f"({one.address}) has training ranks [0], the rollout side" in log, log
    assert f"({other.address}) has engines [0]" in log and f"--host {other.address} " in command_of(run, 0)


def test_data_parallel_ranks_on_two_hosts(two: FakeCluster, shared: Path, flags: Flags) -> None:
    """Law: ranks on two hosts train one model, write one checkpoint, and feed an engine through the shared disk."""
    save = shared / "save"
    where = ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1", "--update-weight-transport", "disk"]
    with HostedRun(two, shared / "parallel", [*flags, *where, "--save", save, "--save-interval", "2"]) as run:
        finished(run)
    log = (run.run_dir / "logs" / "driver.log").read_text()
    assert "has training ranks [0], the rollout side" in log and "has training ranks [1], engines [0]" in log, log
    assert latest_step(save) == STEPS - 1
    assert not list(save.glob(".seen-by*")) and not list((run.run_dir).glob(".seen-by*"))


def test_asynchronous_run_on_two_hosts(two: FakeCluster, shared: Path, flags: Flags) -> None:
    """Law: the other loop, too; the cluster is found by RAY_ADDRESS."""
    with HostedRun(two, shared / "async", flags, script="train_async.py", by_variable=True) as run:
        finished(run)


def test_an_engine_on_two_hosts_beside_a_trainer_on_a_third(three: FakeCluster, shared: Path, flags: Flags) -> None:
    """Law: two servers on two hosts are one engine (TP 2): verified, it serves from both; when the server that nobody
    asks is killed, it starts again as a whole, is verified, and the run goes on."""
    wide = ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--num-rollout", "1000"]
    with HostedRun(three, shared / "wide", [*flags, *wide]) as run:
        run.wait_until("the first step", lambda: 0 in run.metrics("train"))
        log = run.run_dir / "logs" / "driver.log"
        for rank, (host, name) in enumerate(zip(three.hosts[1:], ("0", "0_node1"), strict=True)):
            assert f"({host.address}) has engines [0]" in log.read_text(), log.read_text()
            for said in (f"--host {host.address} ", "--nnodes 2 ", f"--node-rank {rank} ", "--tp-size 2 "):
                assert said in f"{command_of(run, name)} ", (said, command_of(run, name))
        last = three.hosts[2]
        servers = last.pids_of(f"--port {port_of(run, '0_node1')}")
        (server,) = [pid for pid in servers if (stat := read_stat(pid)) is not None and stat.parent not in servers]
        os.kill(server, signal.SIGKILL)
        run.wait_until("word of it", lambda: "engine 0 was lost" in log.read_text())
        run.wait_until("the engine", lambda: "engine 0 serves again" in log.read_text())
        assert "--node-rank 1 " in command_of(run, "0_1_node1") + " ", "the other server was started again, too"
        after = max(run.metrics("train"))
        run.wait_until("two steps more", lambda: max(run.metrics("train")) >= after + 2)
        assert run.interrupt() == 130, run.tail
        require_agreement(run)
        require_balance(run.metrics("train"))
        assert run.left_on_hosts() == []


def test_asynchronous_data_parallel_ranks_on_two_of_three_hosts(three: FakeCluster, shared: Path, flags: Flags) -> None:
    """Law: two hosts train one model while the third one serves them, requests in flight all the time."""
    where = ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1", "--fully-async"]
    with HostedRun(three, shared / "three", [*flags, *where], script="train_async.py") as run:
        finished(run)
    log = (run.run_dir / "logs" / "driver.log").read_text()
    for host, has in zip(three.hosts, ("training ranks [0], the", "training ranks [1]", "engines [0]"), strict=True):
        assert f"({host.address}) has {has}" in log, log


@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_colocated_ranks_of_two_hosts_share_their_slots_with_one_engine(
    transport: str, three: FakeCluster, shared: Path, flags: Flags
) -> None:
    """Law: data-parallel ranks and the ranks of a tensor-parallel engine take turns on the slots of two hosts."""
    where = ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1", "--colocate"]
    where += ["--rollout-num-gpus-per-engine", "2", *(["--update-weight-transport", "disk"] * (transport == "disk"))]
    with HostedRun(three, shared / f"colocated-{transport}", [*flags, *where]) as run:
        finished(run)
    assert json.loads((run.run_dir / "args.json").read_text())["update_weight_transport"] == transport
    log = (run.run_dir / "logs" / "driver.log").read_text()
    assert f"({three.hosts[1].address}) has training ranks [1], engines [0]" in log, log


def test_what_hosts_cannot_give_is_refused_before_engines_start(two: FakeCluster, shared: Path, flags: Flags) -> None:
    """Law: got / because / do, with each host by its name, for slots, transports and folders."""
    one, other = two.hosts
    refused = {
        "slots": (["--actor-num-nodes", "3"], ("the free slots are 1 on", f"({one.address})", f", 2 on {other.name}")),
        "tensor": (
            ["--update-weight-transport", "tensor"],
            ("cannot map its memory", "use distributed or disk"),
        ),
        "save": (["--save", "/tmp/own/save"], (f"{other.name} ({other.address}) does not see --save /tmp/own/save",)),
    }
    for name, (more, said) in refused.items():
        with HostedRun(two, shared / f"refused-{name}", [*flags, *more]) as run:
            assert run.wait() == 2, run.tail
            assert all(part in run.tail for part in said), run.tail
            assert not list((run.run_dir / "logs").glob("engine*")), "an engine was started"
            assert run.left_on_hosts() == []


@pytest.mark.parametrize("killed", ["driver", "guardian and driver", "raylet"])
def test_nothing_is_left_on_any_host(killed: str, two: FakeCluster, shared: Path, flags: Flags) -> None:
    """Law: after SIGKILL of the driver, or of a host's raylet, no host has a process, a port, a shared-memory file or a
    temporary folder of the run; also when the guardian of a host was killed before."""
    cluster = two
    before = [host.ports() for host in cluster.hosts]
    with ExitStack() as stack:
        if killed == "raylet":  # its host is lost to the cluster
            cluster = stack.enter_context(ray_cluster(shared, [1, 1]))
            before = [set(), set()]
        other = cluster.hosts[1]
        name = killed.replace(" ", "-")
        run = stack.enter_context(HostedRun(cluster, shared / f"killed-{name}", [*flags, "--num-rollout", "1000"]))
        run.wait_until("the first step", lambda: 0 in run.metrics("train"))
        assert all(run.left_now(host) for host in cluster.hosts), "the watcher sees the run on both hosts"
        for host in cluster.hosts:
            wide = {(name, where) for name, where in host.listeners() if where not in ("127.0.0.1", host.address)}
            assert {name for name, _ in wide if not name.startswith(RAYS)} == set(), (host.name, wide)
        if killed == "driver":
            asked = [sys.executable, "-c", ASK, f"http://{other.address}:{port_of(run, 0)}/server_info"]
            assert cluster.hosts[0].run(asked).strip() == "401"
        if killed == "raylet":
            other.kill("raylet/raylet")
            gone = time.monotonic() + 120
            while run.left_now(other) and time.monotonic() < gone:
                time.sleep(0.5)
            assert run.left_now(other) == [], "the host is empty, whatever becomes of the run"
            run.end()
        else:
            if killed != "driver":
                gone = other.kill("slime.cluster.guardian")
                run.wait_until("another guardian", lambda: bool(other.detached("slime.cluster.guardian") - {gone}), 60)
            run.kill()
        assert run.left_on_hosts() == []
        print(f"{killed}: clean after {run.clean_s:.1f} s")
        if killed != "raylet":
            assert [h.ports() - ports for h, ports in zip(cluster.hosts, before, strict=True)] == [set(), set()]


def test_a_host_that_loses_who_guards_it_is_guarded_again(two: FakeCluster, shared: Path, flags: Flags) -> None:
    """Law: when the driver's guardian is killed, another one watches; when the actor of another host is killed, nothing
    starts there before another guardian watches, then its engine serves again, verified, although it is the only one;
    the end is in order."""
    own, other = two.hosts
    with HostedRun(two, shared / "unguarded", [*flags, "--num-rollout", "1000"]) as run:
        run.wait_until("the first step", lambda: 0 in run.metrics("train"))
        log = run.run_dir / "logs" / "driver.log"
        gone = own.kill("slime.cluster.guardian")
        run.wait_until("another guardian", lambda: bool(set(own.pids_of("slime.cluster.guardian")) - {gone}))
        (old,) = other.detached("slime.cluster.guardian")
        other.kill("ray::HostActor")
        run.wait_until("the engine", lambda: "engine 0 serves again" in log.read_text())
        said = log.read_text()
        assert said.index(f"host {other.name} ({other.address}) has a guardian again") < said.index("engine 0 responds")
        (new,) = other.detached("slime.cluster.guardian")
        assert new != old
        after = max(run.metrics("train"))
        run.wait_until("two steps more", lambda: max(run.metrics("train")) >= after + 2)
        own.kill("slime.cluster.guardian")
        assert run.interrupt() == 130, run.tail
        assert "processes of the run are left" not in run.tail, run.tail
        require_agreement(run)
        require_balance(run.metrics("train"))
        assert run.left_on_hosts() == []


def test_a_host_that_is_refused_is_asked_again(three: FakeCluster, shared: Path, flags: Flags) -> None:
    """Law: a host that does not see a shared folder when it is to be guarded again is not used, and the run goes on
    with the others; when the folder is there again, so is the host."""
    run_dir, other = shared / "refused", three.hosts[2]
    with HostedRun(three, run_dir, [*flags, "--num-rollout", "1000", "--rollout-num-gpus", "2"]) as run:
        run.wait_until("the first step", lambda: 0 in run.metrics("train"))
        log = run_dir / "logs" / "driver.log"
        other.run(["mount", "-t", "tmpfs", "tmpfs", str(run_dir)])
        other.kill("ray::HostActor")
        told = f"not using host {other.name} ({other.address}) because it does not see --run-dir"
        run.wait_until("the refusal", lambda: told in log.read_text())
        run.wait_until("word of the engine", lambda: "engine 1 waits for its lost host" in log.read_text())
        after = max(run.metrics("train"))
        run.wait_until("two steps more", lambda: max(run.metrics("train")) >= after + 2)
        other.run(["umount", str(run_dir)])
        run.wait_until("the engine", lambda: "engine 1 serves again" in log.read_text())
        assert run.interrupt() == 130, run.tail
        require_agreement(run)
        require_balance(run.metrics("train"))
        assert run.left_on_hosts() == []
        assert not list(run_dir.glob(".seen-by*"))


def test_a_lost_host_takes_its_engines_and_not_the_run(shared: Path, flags: Flags) -> None:
    """Law: the run goes on with the engines of other hosts; when the last of them is lost it is planned over what is
    left, which is too little here, and says so."""
    save = shared / "lost-save"
    flags = [*flags, "--num-rollout", "1000", "--rollout-num-gpus", "2", "--save", save, "--load", save]
    flags += ["--save-interval", "1", "--max-restarts", "1", "--restart-wait-s", "10"]
    with ray_cluster(shared, [1, 1, 1]) as cluster, HostedRun(cluster, shared / "lost", flags) as run:
        run.wait_until("the first checkpoint", lambda: latest_step(save) >= 0)
        log = run.run_dir / "logs" / "driver.log"
        assert f"({cluster.hosts[0].address}) has training ranks [0], the rollout side" in log.read_text()
        os.kill(cluster.hosts[2].init, signal.SIGKILL)
        run.wait_until("word of the host", lambda: "engine 1 waits for its lost host" in log.read_text())
        after = max(run.metrics("train"))
        run.wait_until("two steps more", lambda: max(run.metrics("train")) >= after + 2)
        os.kill(cluster.hosts[1].init, signal.SIGKILL)
        assert run.wait() == 2, run.tail
        for part in (
            "no engine of model default is left",
            "restart 1 of 1: continues with step",
            "the free slots are",
            "the run is not restarted",
        ):
            assert part in run.tail, (part, run.tail)
        require_balance(run.metrics("train"))
        assert run.left_now(cluster.hosts[0]) == []


def test_a_run_outlives_hosts_that_die_or_freeze(shared: Path, flags: Flags) -> None:
    """Law: while a host is away the run goes on with the other one; when it is back, its engine is verified and serves,
    and a guardian watches again. Nothing is lost, nothing is trained twice."""
    rollouts = shared / "storm-rollouts"
    stormy = storm_flags(flags, rollouts)
    with (
        ray_cluster(shared, SIZES) as cluster,
        HostedRun(cluster, shared / "storm", stormy, script="train_async.py") as run,
    ):
        mended = host_storm(run, cluster, SIGNALS, seed=20)
        assert [one.signal for one in mended] == [signum.name for signum in SIGNALS]
        assert all(host.pids_of("slime.cluster.guardian") for host in cluster.hosts), "every host has a guardian"
        assert run.interrupt() == 130, run.tail
        require_exact(run, rollouts)
        require_agreement(run)
        assert run.left_on_hosts() == []
        print(*mended, sep="\n")


@pytest.mark.parametrize("token", [True, False], ids=["token", "no token"])
def test_colocated_run_joins_a_cluster_of_one_host(shared: Path, flags: Flags, token: bool) -> None:
    """Law: on one host a run meets on loopback, whoever started Ray; that it asks for no token is said."""
    more = ["--colocate", "--num-gpus-per-node", "1"]
    with ray_cluster(shared, [2], token=token) as cluster:
        with HostedRun(cluster, shared / f"colocated-{token}", [*flags, *more]) as run:
            finished(run)
        assert "--host 127.0.0.1 " in command_of(run, 0)
        log = (run.run_dir / "logs" / "driver.log").read_text()
        assert "listen on" not in log
        assert ("requires no token, so anyone who can reach it can run code as you" in log) is not token
