"""One run's Ray cluster, from the first process to the last.

`RaySession` starts the guardian, then Ray, and ends them in the opposite order. The environment is made before
(`environment.py`); with `RAY_ADDRESS` set, the run joins that cluster. It waits for Ray to start and for the guardian
to end all that is left; the only thing that reaches it from outside is SIGTERM, which it turns into an exception.

Invariants
1. The guardian starts before the first process that it may have to end, and outlives the driver.
2. Whatever ends the driver (return, exception, Ctrl-C, SIGTERM, SIGKILL), nothing of the run is left.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType, TracebackType

import ray

from slime.cluster.guardian import Guardian, start_guardian

OBJECT_STORE_BYTES = 512 * 2**20
"""Object store of a local run: the batches of two steps, with much room."""


class RaySession:
    """Context manager around the Ray cluster of one run."""

    def __init__(self, run_id: str, *, num_cpus: int, num_gpus: int, log_path: Path) -> None:
        """`log_path`: where the guardian writes what it did."""
        self.run_id, self._log_path = run_id, log_path
        self._num_cpus, self._num_gpus = num_cpus, num_gpus
        self._guardian: Guardian | None = None
        # Ray puts unix sockets below this folder, whose paths may not exceed 107 characters: never the run folder.
        self._temp_dir = Path(tempfile.gettempdir()) / f"slime-ray-{run_id}"

    def __enter__(self) -> RaySession:
        address = os.environ.get("RAY_ADDRESS")
        temp_dirs = [] if address else [str(self._temp_dir)]
        self._guardian = start_guardian(self.run_id, temp_dirs=temp_dirs, log_path=self._log_path)
        if address:
            namespace = f"slime-{self.run_id}"
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
        else:
            self._start_local()
        signal.signal(signal.SIGTERM, _raise_exit)  # Ray puts a handler of its own there when it starts
        return self

    def _start_local(self) -> None:
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

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            ray.shutdown()
        finally:
            if self._guardian is not None:
                self._guardian.close()


def _raise_exit(signum: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds like Ctrl-C, so that every `with` block ends its own processes."""
    sys.exit(128 + signum)
