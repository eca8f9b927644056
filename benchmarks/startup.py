"""Startup of a run: seconds of each phase, CPU seconds and memory of each process.

    python -m benchmarks.startup                      one step of the digits task on a tiny model, trainer and engine
    python -m benchmarks.startup -- --hf-checkpoint ...        flags of train.py instead of this task

Prints one JSON line. Startup ends with the first verified weight sync, after which engines serve. `wall_s` counts
from the start of the command. `phases` are the driver's (`startup/*` of `metrics.jsonl`), its first weight sync and its
evaluation. `cpu_s` (user and system) and `rss_mib` are per process, read from /proc until startup is over, so they
exclude the work of a step. On a busy machine compare CPU seconds, not wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.observability.spans import read_trace
from slime.serving.child_process import ProcessFamily

ROOT = Path(__file__).parents[1]
MARK = "SLIME_BENCHMARK_ID"
LOOK_EVERY_S = 0.2
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ROLES = {
    "sglang::scheduler": "engine: scheduler",
    "sglang::detokenizer": "engine: detokenizer",
    "sglang::router": "router",
    "slime.serving.launch --router": "router",
    "slime.serving.launch": "engine: server",
    "ray::TrainActor": "trainer",
    "ray::RolloutActor": "rollout actor",
    "ray::EngineActor": "engine actor",
    "ray::": "other workers of Ray",
    "slime.rewards": "graders",
    "guardian": "guardian",
    "train.py": "driver",
    "/ray/": "Ray itself",
}
"""Part of a command line -> role of the process; the first match counts."""
END_OF_START = "update_weights"


def role_of(pid: int) -> str:
    """Returns the role of a process, by its command line."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"
    return next((role for part, role in ROLES.items() if part in words), "others")


def used_by(pid: int) -> tuple[float, float] | None:
    """Returns (CPU seconds, resident MiB) of a process so far; None if the process has exited."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S, int(fields[21]) * PAGE_BYTES / 2**20


def default_flags(folder: Path) -> list[str]:
    """Returns flags for one step of the digits task on a tiny model."""
    from recipes.tiny.tasks import DIGITS_FILE, write_all
    from tests.support.tiny import write_tiny_model

    write_all(folder)
    model = write_tiny_model(folder / "model")
    task = f"--prompt-data {folder / DIGITS_FILE} --input-key prompt --label-key label --apply-chat-template"
    sizes = "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 8 --num-rollout 1"
    own = "--custom-rm-path recipes.tiny.tasks:digit_fraction --no-bf16 --device cpu --colocate"
    return ["--hf-checkpoint", str(model), *task.split(), *sizes.split(), *own.split()]


def spans_of(run_dir: Path, name: str) -> Iterator[float]:
    """Returns the seconds of each span of the driver with this name, so far."""
    for path in (run_dir / "traces").glob("driver-*.json"):
        yield from (event["dur"] / 1e6 for event in read_trace(path) if event.get("name") == name)


def measure(flags: list[str], run_dir: Path) -> dict[str, Any]:
    """Runs train.py and measures it until startup is over. Raises `CalledProcessError` if train.py fails."""
    token = secrets.token_hex(8)
    began_s = time.monotonic()
    command = [sys.executable, "train.py", *flags, "--run-dir", str(run_dir)]
    log = run_dir.with_name(run_dir.name + ".out")
    seen: dict[int, tuple[str, float, float]] = {}
    start_s = None
    with log.open("wb") as out:
        environment = {**os.environ, MARK: token}
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        family = ProcessFamily(MARK, token, seeds=[run.pid])
        while run.poll() is None:
            for member in family.refresh() if start_s is None else ():
                if (used := used_by(member.id.pid)) is not None:
                    seen[member.id.pid] = (role_of(member.id.pid), *used)
            if start_s is None and any(spans_of(run_dir, END_OF_START)):
                start_s = time.monotonic() - began_s
            time.sleep(LOOK_EVERY_S)
    if run.returncode != 0 or start_s is None:
        sys.stderr.write(log.read_text(errors="replace")[-3000:])
        raise subprocess.CalledProcessError(run.returncode, command)
    cpu_s: dict[str, float] = defaultdict(float)
    rss_mib: dict[str, float] = defaultdict(float)
    for role, seconds, mib in seen.values():
        cpu_s[role] += seconds
        rss_mib[role] += mib
    return {
        "wall_s": {"start": round(start_s, 1), "whole": round(time.monotonic() - began_s, 1)},
        "phases": _phases(run_dir),
        "cpu_s": {"all": round(sum(cpu_s.values()), 1), **_rounded(cpu_s)},
        "rss_mib": _rounded(rss_mib),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


def _phases(run_dir: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    told = {k: round(v, 2) for row in rows for k, v in row.items() if k.startswith("startup/")}
    first = {name: round(next(spans_of(run_dir, name), 0.0), 2) for name in (END_OF_START, "eval")}
    return {**told, **{f"first {name}": seconds for name, seconds in first.items() if seconds}}


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in sorted(numbers.items(), key=lambda item: -item[1])}


def main() -> int:
    """Runs `python -m benchmarks.startup`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("flags", nargs="*", help="flags of train.py, after --; default: one step of the digits task")
    flags = parser.parse_args().flags
    with tempfile.TemporaryDirectory(prefix="slime-startup-") as folder:
        print(json.dumps(measure(flags or default_flags(Path(folder)), Path(folder) / "run")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
