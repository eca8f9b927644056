"""One host of a run on which the driver does not run, as an actor: the first process of the run there, and the last.

Consumes: calls of the driver, one at a time beside `watching`. Produces: what this host has, what it does not see of
the shared folders, and a guardian that ends the run here (`host_guardian`). Waits for: shared folders to show what is
new, and the guardian at the end, each with a limit; `watching` for as long as a guardian watches. Is woken by: the
driver's calls, and `watching` by the guardian's end.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import ray

from slime.cluster.host_guardian import HostGuardian
from slime.cluster.shared_paths import Contract, not_seen
from slime.core.processes import RUN_ID_ENV
from slime.observability.logs import setup_logging


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host says of itself."""

    name: str
    num_cores: int
    """Cores of processes that Ray starts there."""


def facts_here() -> HostFacts:
    """Of the host that this process runs on."""
    return HostFacts(socket.gethostname(), len(os.sched_getaffinity(0)))


@ray.remote(max_restarts=0, num_cpus=0, max_concurrency=2)
class HostActor:
    """Shell around `HostGuardian`, with eyes."""

    def __init__(self) -> None:
        self._guardian: HostGuardian | None = None

    def facts(self) -> HostFacts:
        return facts_here()

    def not_seen(self, contract: Contract) -> list[str]:
        """What this host does not see as the driver does, in words."""
        return not_seen(contract)

    def guard(self, log_dir: str) -> None:
        """Starts the guardian; from now on nothing of the run outlives its driver here. `log_dir` is shared."""
        name = socket.gethostname()
        setup_logging(Path(log_dir) / f"host_{name}.log", crashes=True)
        self._guardian = HostGuardian(os.environ[RUN_ID_ENV], log_path=Path(log_dir) / f"guardian_{name}.log")

    def take_up(self, contract: Contract, log_dir: str) -> list[str]:
        """Of a host that came back: what it does not see; if it sees everything, it is guarded now."""
        problems = not_seen(contract)
        if not problems:
            self.guard(log_dir)
        return problems

    def watching(self) -> None:
        """Returns when no guardian watches here any more, and none follows."""
        assert self._guardian is not None, "nobody watches yet"
        self._guardian.wait()

    def close(self) -> None:
        """Ends what is left of the run here, this process spared."""
        if self._guardian is not None:
            self._guardian.close()
            self._guardian = None
