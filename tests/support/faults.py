"""Faults in a run that lives: which processes are whose, and that a signal did what it was meant to do."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from slime.serving.child_process import all_processes, read_stat
from tests.support.e2e import RealRun

SERVER, SCHEDULER, ROUTER, WORKER = "server", "sglang::schedul", "router", "ray::EpisodeAct"
"""Who can be hit: the first process of an engine, its scheduler, the policy's router, a worker of the rollout."""
ENDED = "ZXtT"
"""States of a process that does nothing any more."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Victim:
    """One process of a run."""

    pid: int
    url: str | None
    """Of the engine that it belongs to."""


def engine_log(run_dir: Path, index: int) -> Path:
    """The log of the latest incarnation of an engine."""
    logs = run_dir / "logs"
    later = [
        int(match[1]) for path in logs.glob(f"engine_{index}_*.log") if (match := re.search(r"_(\d+)\.log$", path.name))
    ]
    return logs / (f"engine_{index}_{max(later)}.log" if later else f"engine_{index}.log")


def processes_of_engine(run: RealRun, index: int) -> dict[str, int]:
    """Name -> pid of the server of an engine and of what SGLang calls its own below it."""
    everyone = all_processes()
    words = f"\0--port\0{_port_of(engine_log(run.run_dir, index))}\0".encode()
    servers = [pid for pid in everyone if words in _command_of(pid)]
    assert servers, f"no process of engine {index}"
    server = next(pid for pid in servers if everyone[pid].parent not in servers)
    own = {s.name: pid for pid, s in everyone.items() if s.parent == server and s.name.startswith("sglang::")}
    return {SERVER: server, **own}


def victim_of(run: RealRun, who: str, index: int) -> Victim:
    """The process that a fault hits. `index`: of the engine, or worker, unless it is the router."""
    if who == WORKER:
        workers = [pid for pid, stat in all_processes().items() if stat.name == WORKER and _is_of(run, pid)]
        return Victim(sorted(workers)[index], None)
    if who == ROUTER:
        found = [pid for pid, stat in all_processes().items() if stat.name == "sglang::router" and _is_of(run, pid)]
        assert len(found) == 1, f"{len(found)} routers of the run"
        return Victim(found[0], None)
    url = f"http://127.0.0.1:{_port_of(engine_log(run.run_dir, index))}"
    return Victim(processes_of_engine(run, index)[who], url)


def requests_at(run: RealRun, url: str) -> int:
    """Requests that an engine has, running or waiting."""
    key = (run.run_dir / "router_key").read_text()
    request = urllib.request.Request(f"{url}/v1/loads?include=core", headers={"Authorization": f"Bearer {key}"})
    with _OPENER.open(request, timeout=30) as response:
        loads = json.loads(response.read())["loads"]
    return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)


def hit(victim: Victim, signum: signal.Signals) -> float:
    """Sends the signal; when, by the clock of `time.time`. Fails as NOT PROVEN if the process goes on."""
    sent = time.time()
    os.kill(victim.pid, signum)
    assert happened(victim.pid), f"NOT PROVEN: process {victim.pid} goes on after {signum.name}"
    return sent


def happened(pid: int) -> bool:
    """Whether a process ended, or stopped, within the seconds that a busy kernel may take."""
    deadline = time.monotonic() + 10.0
    while (now := read_stat(pid)) is not None and now.state not in ENDED:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _port_of(log: Path) -> str:
    found = re.search(r"--port (\d+)", log.read_text(errors="replace"))
    assert found is not None, f"no port in {log}"
    return found[1]


def _is_of(run: RealRun, pid: int) -> bool:
    mark = f"={run.traces.run_id}".encode()
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() + b"\0"
    except OSError:
        return b""
