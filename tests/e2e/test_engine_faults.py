"""A run survives its engines: one that is killed, or stopped, comes back with the current weights and serves again."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.serving.proctree import all_processes, read_stat
from tests.support.e2e import Flags, RealRun

pytestmark = pytest.mark.slow

CONSTANT_LR = ["--lr", "1e-3", "--lr-decay-style", "constant"]


def processes_of_engine(run: RealRun, index: int) -> dict[str, int]:
    """Name -> pid of the server of an engine and of what SGLang calls its own below it."""
    log = (run.run_dir / "logs" / f"engine_{index}.log").read_text()
    port = re.search(r"--port (\d+)", log)
    assert port is not None, log[:500]
    words = f"\0--port\0{port[1]}\0".encode()
    everyone = all_processes()
    servers = [pid for pid in everyone if words in _command_of(pid)]
    assert servers, f"no process of engine {index}"
    server = next(pid for pid in servers if everyone[pid].parent not in servers)
    own = {s.name: pid for pid, s in everyone.items() if s.parent == server and s.name.startswith("sglang::")}
    return {"server": server, **own}


def happened(pid: int) -> bool:
    """Whether a process ended, or stopped, within the seconds that a busy kernel may take."""
    deadline = time.monotonic() + 10.0
    while (now := read_stat(pid)) is not None and now.state not in "ZXtT":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() + b"\0"
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("script", "victim", "signum", "where"),
    [
        ("train.py", "server", signal.SIGKILL, []),
        ("train_async.py", "sglang::schedul", signal.SIGSTOP, ["--update-weight-transport", "distributed"]),
        (
            "train.py",
            "sglang::schedul",
            signal.SIGKILL,
            ["--colocate", "--actor-num-gpus-per-node", "2", "--update-weight-transport", "disk"],
        ),
    ],
)
def test_an_engine_that_is_lost_serves_again(
    runs: Path,
    digits: Callable[[Path], Flags],
    tiny_qwen3: Path,
    script: str,
    victim: str,
    signum: signal.Signals,
    where: Flags,
) -> None:
    """Law: the loss of one of two engines is noticed, costs no prompt, and ends with verified weights in its place."""
    flags = [*digits(tiny_qwen3), *CONSTANT_LR, "--rollout-num-gpus", "2", "--num-rollout", "100000", *where]
    run_dir = runs / f"lost-{script}-{victim}-{signum.name}".replace("::", "-")
    with RealRun(run_dir, flags, script=script) as run:

        def steps() -> int:
            return max(run.metrics("train"), default=-1) if (run_dir / "metrics.jsonl").exists() else -1

        run.wait_until("step 1", lambda: steps() >= 1)
        pid = processes_of_engine(run, 1)[victim]
        os.kill(pid, signum)
        assert happened(pid), f"NOT PROVEN: process {pid} goes on after {signum.name}"
        run.wait_until("word of the loss", lambda: "engine 1 was lost" in run.output)
        run.wait_until("engine 1 to serve again", lambda: serves_again(run))
        after = steps()
        run.wait_until("two steps more", lambda: steps() >= after + 2)
        assert run.interrupt() == 130, run.tail
        for step, row in run.metrics("train").items():
            settled = row["data/trained"] + row["data/filtered"] + row["data/failed"]
            assert row["data/issued"] == settled + row["data/buffered"] + row["data/in_flight"], (step, row)
            assert row["data/failed"] == 0, (step, row)
        assert run.left() == []


def serves_again(run: RealRun) -> bool:
    """It joined by itself, or a weight sync of all took it along: the router sends to its second incarnation."""
    log = run.run_dir / "logs" / "engine_1_1.log"
    return log.exists() and "POST /generate" in log.read_text(errors="replace")
