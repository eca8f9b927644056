"""The cores that this process may use, and how the threads of a process that computes on CPUs share them with others.

A container's CPU quota limits time: its threads run on all cores of the host until the quota is used up, and then stop
until the next period. More threads than the quota has cores only make that happen earlier.

OpenMP's threads wait for each other in loops that keep their cores, many times in each layer. That is the fastest way
as long as each has a core of its own; where other work has one of them, the others burn theirs while they wait for it.
`benchmarks/results/few_cores.json`: an engine of two threads on two cores with other work makes a fourth of the tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""How threads wait: the user's word."""


def usable_cores() -> int:
    """Cores that the affinity of this process and the CPU quotas of its control groups allow, rounded up."""
    allowed = min([len(os.sched_getaffinity(0)), *map(_quota, _control_groups())])
    return max(1, math.ceil(allowed))


def stalled_share() -> float:
    """Share of the last minute in which every thread of this control group that wanted a core waited for one.

    From the kernel's pressure stall information, which has groups of cgroup v2 alone; 0 without it.
    """
    for group in _control_groups():
        for line in _lines(group / "cpu.pressure"):
            if line.startswith("full"):
                return float(line.split()[2].removeprefix("avg60=")) / 100
    return 0.0


def _control_groups() -> Iterator[Path]:
    """Folders of the control group of this process and of those above it, its own first; some may not exist.

    A container often has its own group at the top, under whatever name the host knows it.
    """
    for line in _lines(OWN_CGROUPS):
        number, controllers, name = line.split(":", 2)
        if number == "0" or "cpu" in controllers.split(","):
            top = CGROUPS if number == "0" else CGROUPS / "cpu"
            own = top / name.lstrip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(top))


def _quota(group: Path) -> float:
    """Seconds of processor time per second that a group may use; infinity without a limit."""
    files = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # of cgroup v2, and of v1
    words = [word for file in files for line in _lines(group / file) for word in line.split()]
    return math.inf if len(words) != 2 or words[0] in ("max", "-1") else int(words[0]) / int(words[1])


def _lines(file: Path) -> list[str]:
    """None if the file cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def thread_variables(num_threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What a process that computes in so many threads is to find in its environment, which OpenMP and MKL read once.

    Trainer and engine may both have as many: where that is more than the cores there are, threads that wait sleep.
    """
    number = str(num_threads)
    sleeps = 2 * num_threads > usable_cores() and not any(name in environment for name in WAITING)
    return {"OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number} | ({"OMP_WAIT_POLICY": "PASSIVE"} if sleeps else {})
