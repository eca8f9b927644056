"""One run's Ray cluster, from the first process to the last.

`RaySession` sets the run id in the environment (every process of the run inherits it), starts the reaper, then Ray, and
ends them in the opposite order. On one machine Ray listens on loopback only and asks for a token made for this run; to
use a cluster that exists already, start it with `ray start` and set `RAY_ADDRESS`.

Invariants
1. The reaper starts before the first process that it may have to end, and outlives the driver.
2. Whatever ends the driver (return, exception, Ctrl-C, SIGTERM, SIGKILL), nothing of the run is left.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType, TracebackType

import ray

from slime.cluster.reaper import Reaper, start_reaper
from slime.core.ids import RUN_ID_ENV

OBJECT_STORE_BYTES = 512 * 2**20
"""Object store of a local run: the batches of two steps, with much room."""

LOCAL_RAY_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would start one idle worker per core at once; a laptop needs exactly the actors of the plan.
    "RAY_prestart_worker_first_driver": "0",
    # Ray binds to the host's address unless it is told that this is no cluster; then it stays on 127.0.0.1.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_RUNTIME_ENV_HOOK": "",
}
"""Environment of a Ray cluster that serves one run on one machine."""


class RaySession:
    """Context manager around the Ray cluster of one run."""

    def __init__(self, run_id: str, *, num_cpus: int, num_gpus: int) -> None:
        self.run_id = run_id
        self._num_cpus, self._num_gpus = num_cpus, num_gpus
        self._reaper: Reaper | None = None
        # Ray puts unix sockets below this folder, whose paths may not exceed 107 characters: never the run folder.
        self._temp_dir = Path(tempfile.gettempdir()) / f"slime-ray-{run_id}"

    def __enter__(self) -> RaySession:
        os.environ[RUN_ID_ENV] = self.run_id
        signal.signal(signal.SIGTERM, _raise_exit)
        address = os.environ.get("RAY_ADDRESS")
        self._reaper = start_reaper(self.run_id, temp_dirs=[] if address else [str(self._temp_dir)])
        if address:
            namespace = f"slime-{self.run_id}"
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
            return self
        for name, value in LOCAL_RAY_ENV.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        ray.init(
            num_cpus=self._num_cpus,
            num_gpus=self._num_gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
            namespace=f"slime-{self.run_id}",
            _temp_dir=str(self._temp_dir),
        )
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            ray.shutdown()
        finally:
            if self._reaper is not None:
                self._reaper.close()


def _raise_exit(signum: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds like Ctrl-C, so that every `with` block ends its own processes."""
    sys.exit(128 + signum)
