"""Memory, descriptors, threads and shared memory of one run with hundreds of weight syncs and dozens of lost engines.

    python -m benchmarks.fleet_soak [--syncs 500] [--restarts 50] [--output FILE]

A tiny model trains on two engines, one of which is killed repeatedly while the other serves. Every ten steps the
benchmark records resident memory, open descriptors and threads of all processes that live as long as the run, and the
bytes in /dev/shm. It compares the last tenth of these records with the second tenth, when everything is warm. Growth
beyond `MOST_GROWTH` is an error. Needs two cores and no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

from recipes.tiny.tasks import DIGITS_FILE, write_all
from slime.serving.child_process import all_processes
from tests.support.e2e import RealRun, digits_task
from tests.support.fault_storm import last_step
from tests.support.faults import SERVER, hit, victim_of
from tests.support.tiny import write_tiny_model

LIVE_LONG = ("ray::TrainActor", "ray::RolloutActor", "sglang::router", "raylet", "gcs_server")
"""Names of the processes, besides the driver, that run from the start to the end of the run."""
MOST_GROWTH = {"resident_mb": 0.05, "descriptors": 0.05, "threads": 0.05, "shared_mb": 0.05}
"""Allowed growth as a fraction of the second tenth."""
LEAST_GROWTH = {"resident_mb": 20.0, "descriptors": 8.0, "threads": 4.0, "shared_mb": 4.0}
"""Allowed absolute growth, for measures that start small."""
FLAGS = "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 8 --rollout-num-gpus 2 --lr 1e-3"
MORE = "--lr-decay-style constant --num-rollout 100000 --no-bf16 --router-log-level warn"
"""More flags. The router flag makes the run start a router."""
EVERY = 10
"""Steps between two records."""
RESTART_LIMIT_S = 900.0


def looked(run: RealRun, driver: int) -> dict[str, dict[str, float]]:
    """Returns role -> current measures of its process."""
    found: dict[str, dict[str, float]] = {}
    for pid, stat in all_processes().items():
        if stat.id not in run.traces.members:
            continue
        role = "driver" if pid == driver else next((name for name in LIVE_LONG if _name(pid).startswith(name)), None)
        if role is None:
            continue
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            found[role] = {
                "resident_mb": int(fields["VmRSS"].split()[0]) / 1024,
                "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),
                "threads": float(fields["Threads"]),
            }
    shared = sum(file.stat().st_size for file in os.scandir("/dev/shm") if file.is_file())
    found["host"] = {"shared_mb": shared / 2**20}
    return found


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return os.path.basename(words[0].decode(errors="replace"))
    return ""


def keep_killing(run: RealRun, times: int, mended: list[float], over: threading.Event) -> None:
    """Kills the server of engine 1, each time after it serves again."""
    log = run.run_dir / "logs" / "driver.log"
    for number in range(times):
        before = log.read_text(errors="replace").count("engine 1 serves again")
        began = hit(victim_of(run, SERVER, 1), signal.SIGKILL)
        while log.read_text(errors="replace").count("engine 1 serves again") == before:
            if over.is_set():
                return
            assert time.time() - began < RESTART_LIMIT_S, f"restart {number} is not over after {RESTART_LIMIT_S:.0f} s"
            time.sleep(0.2)
        mended.append(round(time.time() - began, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--syncs", type=int, default=500)
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    looks: list[dict[str, dict[str, float]]] = []
    mended: list[float] = []
    over = threading.Event()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", "qwen3")
        write_all(folder / "tasks")
        flags = [*digits_task(model, folder / "tasks" / DIGITS_FILE), *FLAGS.split(), *MORE.split()]
        with RealRun(folder / "run", flags) as run:
            run.wait_until("step 1", lambda: last_step(run) >= 1)
            driver = run.traces.driver
            killer = threading.Thread(target=keep_killing, args=(run, options.restarts, mended, over))
            killer.start()
            try:
                step = EVERY
                while step <= options.syncs or killer.is_alive():
                    run.wait_until(f"step {step}", lambda now=step: last_step(run) >= now)  # type: ignore[misc]
                    looks.append(looked(run, driver))
                    step += EVERY
            finally:
                over.set()
                killer.join()
            steps = last_step(run)
            assert run.interrupt() == 130, run.tail
            left = run.left()
    result = {
        "command": " ".join(["python", "-m", "benchmarks.fleet_soak", *sys.argv[1:]]),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "weight_syncs": steps + 1,
        "restarts": len(mended),
        "restart_s_median": statistics.median(mended),
        "restart_s_worst": max(mended),
        "then_and_now": compared(looks),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    assert left == [], left
    grown = grown_in(compared(looks))
    assert not grown, "; ".join(grown)
    assert len(mended) == options.restarts, f"{len(mended)} of {options.restarts} restarts"


def compared(looks: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Returns role -> measure -> medians of the second and the last tenth of the records."""
    tenth = max(len(looks) // 10, 1)
    out: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for role in looks[-1]:
        for measure in looks[-1][role]:
            series = [look[role][measure] for look in looks if role in look]
            then, now = series[tenth : 2 * tenth] or series[:1], series[-tenth:]
            out[role][measure] = [round(statistics.median(then), 1), round(statistics.median(now), 1)]
    return dict(out)


def grown_in(table: dict[str, dict[str, list[float]]]) -> list[str]:
    """Returns messages about measures that grew beyond their limits."""
    return [
        f"{measure} of {role}: {then} -> {now}"
        for role, measures in table.items()
        for measure, (then, now) in measures.items()
        if now - then > max(MOST_GROWTH[measure] * then, LEAST_GROWTH[measure])
    ]


if __name__ == "__main__":
    main()
