"""Faults of whole hosts in one run, at random moments: all processes of one end, or freeze, and come back later.

The run trains fully asynchronously on one host with an engine on each of two others. A fault waits until the engine of
its host has enough requests, hits everything on the host (Ray's daemon, the owner of the engine, the engine, the
guardian), and is shown to have happened. When it has been noticed and the run has trained two more steps, the host
comes back: after SIGSTOP its processes go on, after SIGKILL a new daemon of Ray starts there. The storm goes on when
its engine serves again, verified.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from slime.serving.child_process import read_stat
from tests.support.fault_storm import LEAST_IN_FLIGHT, NUM_ENGINES, SETTLE_S, last_step, times_said
from tests.support.faults import engine_log, happened
from tests.support.hosted_run import HostedRun
from tests.support.hosts import FakeCluster, FakeHost

SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
SIZES = [1] + [1] * NUM_ENGINES
"""Slots of the hosts of a storm: one for the trainer, one for each engine."""
ASKER = """
import json, sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
for line in sys.stdin:
    url, key = line.split()
    asked = urllib.request.Request(url + "/v1/loads?include=core", headers={"Authorization": "Bearer " + key})
    try:
        loads = json.load(opener.open(asked, timeout=30))["loads"]
        print(sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads), flush=True)
    except OSError:
        print(0, flush=True)
"""
"""Tells how many requests engines have, from a host that reaches them."""


@dataclass(frozen=True, slots=True)
class HostMended:
    """One fault of a host, and how it went; seconds count from the signal."""

    signal: str
    host: str
    """Its address."""
    in_flight: int
    """Requests at its engine."""
    num_hit: int
    """Processes that ended, or froze."""
    noticed_s: float
    """Until the driver said that the engine was lost."""
    back_s: float
    """Until the host was there again: two steps were trained in between."""
    serving_s: float
    """Until its engine served again, verified."""


def host_storm(run: HostedRun, cluster: FakeCluster, signals: Sequence[signal.Signals], seed: int) -> list[HostMended]:
    """Hits the hosts of engines with each of these, in this order; each time when the last one is mended."""
    chance = random.Random(seed)
    run.wait_until("step 1", lambda: last_step(run) >= 1, SETTLE_S)
    with _asking(cluster.hosts[0]) as asker:
        return [_one(run, cluster, asker, signum, chance) for signum in signals]


def _one(
    run: HostedRun, cluster: FakeCluster, asker: subprocess.Popen[str], signum: signal.Signals, chance: random.Random
) -> HostMended:
    index = chance.randrange(NUM_ENGINES)
    host, url = _where(run, cluster, index)
    log = run.run_dir / "logs" / "driver.log"
    lost, again = f"engine {index} was lost", f"engine {index} serves again"
    before = {words: times_said(log, words) for words in (lost, again)}
    time.sleep(chance.uniform(0.0, 3.0))
    in_flight = 0

    def busy() -> bool:
        nonlocal in_flight
        in_flight = _requests_at(run, asker, url)
        return in_flight >= LEAST_IN_FLIGHT

    run.wait_until(f"{LEAST_IN_FLIGHT} requests at engine {index}", busy, SETTLE_S)
    began = time.monotonic()
    num_hit = _hit(host, signum)
    run.wait_until(f"word of {host.name}", lambda: times_said(log, lost) > before[lost], SETTLE_S)
    noticed_s, after = time.monotonic() - began, last_step(run)
    run.wait_until("two steps without it", lambda: last_step(run) >= after + 2, SETTLE_S)
    assert times_said(log, again) == before[again], "NOT PROVEN: the engine served while its host was away"
    if signum == signal.SIGSTOP:
        for pid in processes_of(host):
            os.kill(pid, signal.SIGCONT)
    else:
        host.empty_memory()
        host.start_ray(1, head=cluster.address)
    back_s = time.monotonic() - began
    run.wait_until(again, lambda: times_said(log, again) > before[again], SETTLE_S)
    serving_s = time.monotonic() - began
    later = engine_log(run.run_dir, index)
    run.wait_until("requests at it", lambda: "POST /generate" in later.read_text(errors="replace"), SETTLE_S)
    told = (round(seconds, 1) for seconds in (noticed_s, back_s, serving_s))
    return HostMended(signum.name, host.address, in_flight, num_hit, *told)


def processes_of(host: FakeHost) -> list[int]:
    """All processes of a host but its init, and what that one sleeps with."""
    found = []
    for pid in host.pids_of(""):
        stat = read_stat(pid)
        if pid != host.init and stat is not None and (stat.parent, stat.name) != (host.init, "sleep"):
            found.append(pid)
    return found


def _hit(host: FakeHost, signum: signal.Signals) -> int:
    """Sends the signal to all processes of a host, also to those that start meanwhile; how many there were."""
    hit: set[int] = set()
    while more := set(processes_of(host)) - hit:
        for pid in more:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        hit |= more
    assert hit, f"NOT PROVEN: {host.name} had no process"
    assert all(happened(pid) for pid in hit), f"NOT PROVEN: processes of {host.name} go on after {signum.name}"
    return len(hit)


def _where(run: HostedRun, cluster: FakeCluster, index: int) -> tuple[FakeHost, str]:
    """The host of an engine, and its address."""
    command = engine_log(run.run_dir, index).read_text(errors="replace")
    found = re.search(r"--host (\S+) --port (\d+)", command)
    assert found is not None, f"no address of engine {index}"
    (host,) = [host for host in cluster.hosts if host.address == found[1]]
    return host, f"http://{found[1]}:{found[2]}"


def _requests_at(run: HostedRun, asker: subprocess.Popen[str], url: str) -> int:
    ask, answer = _pipes(asker)
    ask.write(f"{url} {(run.run_dir / 'router_key').read_text().strip()}\n")
    ask.flush()
    return int(answer.readline())


def _pipes(asker: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert asker.stdin is not None and asker.stdout is not None, "the asker was started without pipes"
    return asker.stdin, asker.stdout


@contextmanager
def _asking(host: FakeHost) -> Iterator[subprocess.Popen[str]]:
    """`ASKER` on this host."""
    words = host.command([sys.executable, "-c", ASKER])
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asker:
        try:
            yield asker
        finally:
            _pipes(asker)[0].close()  # its input ends, and so does it
