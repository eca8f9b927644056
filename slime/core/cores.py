"""The number of cores that this process may use, and thread settings of processes that compute on CPUs.

A container's CPU quota limits time: threads run on all cores of the host until the quota is used up, then stop until
the next period. If there are more threads than cores in the quota, the threads only stop earlier.

OpenMP threads wait for each other in busy loops, many times per layer. Busy loops are fastest while each thread has a
core to itself. If other work takes one core, the threads on the other cores waste time in their loops: an engine with
two threads on two busy cores generates a quarter of the tokens (`benchmarks/results/few_cores.json`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables that choose how idle threads wait. Values that the user has set are kept."""


def usable_cores() -> int:
    """Returns the number of cores that CPU affinity and the quotas of control groups leave this process, rounded up."""
    allowed = min([len(os.sched_getaffinity(0)), *map(_quota, _control_groups())])
    return max(1, math.ceil(allowed))


def stalled_share() -> float:
    """Returns the share of the last minute in which all runnable threads of this control group waited for a core.

    Reads the kernel's pressure stall information. Returns 0 if the kernel provides none (cgroup v1).
    """
    for group in _control_groups():
        for line in _lines(group / "cpu.pressure"):
            if line.startswith("full"):
                return float(line.split()[2].removeprefix("avg60=")) / 100
    return 0.0


def _control_groups() -> Iterator[Path]:
    """Yields the folders of this process's control group and then of its ancestors. Some may not exist.

    A container often sees its own group as the root, with a different name from the host's.
    """
    for line in _lines(OWN_CGROUPS):
        number, controllers, name = line.split(":", 2)
        if number == "0" or "cpu" in controllers.split(","):
            top = CGROUPS if number == "0" else CGROUPS / "cpu"
            own = top / name.lstrip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(top))


def _quota(group: Path) -> float:
    """Returns how many seconds of processor time per second a group may use; infinity without a limit."""
    files = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # cgroup v2 has the first file, v1 has the other two
    words = [word for file in files for line in _lines(group / file) for word in line.split()]
    return math.inf if len(words) != 2 or words[0] in ("max", "-1") else int(words[0]) / int(words[1])


def _lines(file: Path) -> list[str]:
    """Returns the lines of the file; empty if it cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def thread_variables(num_threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables of OpenMP and MKL for a process that computes in `num_threads` threads.

    Trainer and engine may each have `num_threads`. If there are not enough cores for both, waiting threads sleep
    instead of running busy loops.
    """
    number = str(num_threads)
    sleeps = 2 * num_threads > usable_cores() and not any(name in environment for name in WAITING)
    return {"OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number} | ({"OMP_WAIT_POLICY": "PASSIVE"} if sleeps else {})
