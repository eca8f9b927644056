"""CPU cores available to this process, and settings of threads and memory for processes that compute on CPUs.

A container's CPU quota limits CPU time: threads run on any core of the host until the quota is used up, and are then
throttled until the next period. With more threads than cores in the quota, throttling only starts earlier.

OpenMP threads spin at barriers, many times per layer. Spinning is fastest while every thread has a core to itself. If
other work takes one core, the threads on the other cores waste time spinning: an engine with two threads on two busy
cores generates a quarter of the tokens (`benchmarks/results/few_cores.json`).

glibc returns large blocks to the system as soon as they are freed, so every layer's results get new pages, which the
kernel must zero. Processes that compute on CPUs keep freed memory instead.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that control how idle threads wait. If the user sets any of them, slime sets none."""


KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Environment variables that make glibc keep freed memory in a new process. If the user sets one, slime sets none."""
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>


def keep_freed_memory() -> None:
    """Applies `KEPT_MEMORY` to this process, which is already running. Does nothing if the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and memory_variables(os.environ):
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)  # never


def memory_variables(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Returns `KEPT_MEMORY`, or nothing if the user has set one of its variables."""
    return {} if KEPT_MEMORY.keys() & environment.keys() else KEPT_MEMORY


def usable_cores() -> int:
    """Returns the number of cores available under CPU affinity and cgroup quotas, rounded up."""
    allowed = min([len(os.sched_getaffinity(0)), *map(_quota, _control_groups())])
    return max(1, math.ceil(allowed))


def stalled_share() -> float:
    """Returns the fraction of the last minute in which all runnable threads of this cgroup were waiting for a core.

    Reads the kernel's pressure stall information. Returns 0 if there is none (cgroup v1).
    """
    for group in _control_groups():
        for line in _lines(group / "cpu.pressure"):
            if line.startswith("full"):
                return float(line.split()[2].removeprefix("avg60=")) / 100
    return 0.0


def _control_groups() -> Iterator[Path]:
    """Yields the folders of this process's cgroup and its ancestors, innermost first. Some may not exist.

    A container often sees its own cgroup as the root, under a different name than on the host.
    """
    for line in _lines(OWN_CGROUPS):
        number, controllers, name = line.split(":", 2)
        if number == "0" or "cpu" in controllers.split(","):
            top = CGROUPS if number == "0" else CGROUPS / "cpu"
            own = top / name.lstrip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(top))


def _quota(group: Path) -> float:
    """Returns the CPU quota of a cgroup in cores; infinity without a limit."""
    files = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # cgroup v2 has the first file, v1 has the other two
    words = [word for file in files for line in _lines(group / file) for word in line.split()]
    return math.inf if len(words) != 2 or words[0] in ("max", "-1") else int(words[0]) / int(words[1])


def _lines(file: Path) -> list[str]:
    """Returns the file's lines, or an empty list if it cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def thread_variables(num_threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the OpenMP and MKL environment variables for a process with `num_threads` compute threads.

    Assumes that a trainer and an engine run side by side with `num_threads` each. If there are too few cores for both,
    waiting threads sleep instead of spinning.
    """
    number = str(num_threads)
    sleeps = 2 * num_threads > usable_cores() and not any(name in environment for name in WAITING)
    return {"OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number} | ({"OMP_WAIT_POLICY": "PASSIVE"} if sleeps else {})
