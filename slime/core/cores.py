"""How the threads of a process that computes on CPUs share the cores of its host with others.

OpenMP's threads wait for each other in loops that keep their cores, many times in each layer. That is the fastest way
as long as each has a core of its own; where other work has one of them, the others burn theirs while they wait for it.
`benchmarks/results/few_cores.json`: an engine of two threads on two cores with other work makes a fourth of the tokens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""How threads wait: the user's word."""


def thread_variables(num_threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What a process that computes in so many threads is to find in its environment, which OpenMP and MKL read once.

    Trainer and engine may both have as many: where that is more than the cores there are, threads that wait sleep.
    """
    number = str(num_threads)
    sleeps = 2 * num_threads > (os.cpu_count() or 1) and not any(name in environment for name in WAITING)
    return {"OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number} | ({"OMP_WAIT_POLICY": "PASSIVE"} if sleeps else {})
