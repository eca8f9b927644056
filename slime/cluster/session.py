"""One run's processes, from the first to the last: its guardian and its Ray cluster.

`guarded` is the outer block, `RaySession` the inner one; what has processes of its own and outlives Ray stands between
them (the views: W&B). The environment is made before (`environment.py`); with `RAY_ADDRESS` set, the run joins that
cluster. They wait for Ray to start and for the guardian to end all that is left; the only thing that reaches them from
outside is SIGTERM, which becomes an exception.

Invariants
1. The guardian starts before the first process that it may have to end, and outlives the driver.
2. Whatever ends the driver (return, exception, Ctrl-C, SIGTERM, SIGKILL), nothing of the run is left.
3. After a return, an exception or Ctrl-C the guardian ends only what is left when everything else has ended by itself.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

import ray

from slime.cluster.guardian import start_guardian
from slime.core.blame import one_line
from slime.core.errors import ActorFailed

logger = logging.getLogger(__name__)

SLOW_START = "timed out during startup"
"""In Ray's message (2.60)."""
OBJECT_STORE_BYTES = 512 * 2**20
"""Object store of a local run: the batches of two steps, with much room."""


def ray_folder(run_id: str) -> Path:
    """Where a local Ray of the run keeps its files."""
    # Ray puts unix sockets below it, whose paths may not exceed 107 characters: never the run folder.
    return Path(tempfile.gettempdir()) / f"slime-ray-{run_id}"


@contextmanager
def guarded(run_id: str, *, log_path: Path) -> Iterator[None]:
    """Nothing of the run outlives the block, nor this process. `log_path`: where the guardian writes what it did."""
    temp_dirs = [] if os.environ.get("RAY_ADDRESS") else [str(ray_folder(run_id))]
    guardian = start_guardian(run_id, temp_dirs=temp_dirs, log_path=log_path)
    try:
        yield
    finally:
        guardian.close()


class RaySession:
    """Context manager around the Ray cluster of one run."""

    def __init__(self, run_id: str, *, num_cpus: int, num_gpus: int) -> None:
        """`num_cpus`, `num_gpus`: what a local cluster has to give."""
        self.run_id = run_id
        self._num_cpus, self._num_gpus = num_cpus, num_gpus

    def __enter__(self) -> RaySession:
        address = os.environ.get("RAY_ADDRESS")
        if address:
            namespace = f"slime-{self.run_id}"
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
        else:
            self._start_local()
        signal.signal(signal.SIGTERM, _raise_exit)  # Ray puts a handler of its own there when it starts
        return self

    def _start_local(self) -> None:
        """Raises `ActorFailed` if Ray does not start: it gives its own processes 30 s, too few on a busy machine."""
        for last in (False, False, True):
            try:
                self._init_local()
                return
            except Exception as error:
                ray.shutdown()
                if last or SLOW_START not in str(error):
                    raise ActorFailed(
                        f"Ray did not start: {one_line(error)}; look at the load and the free memory of this machine"
                    ) from error
                logger.warning("Ray did not start in 30 s on this busy machine; again")

    def _init_local(self) -> None:
        ray.init(
            num_cpus=self._num_cpus,
            num_gpus=self._num_gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
            namespace=f"slime-{self.run_id}",
            _temp_dir=str(ray_folder(self.run_id)),
        )

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ray.shutdown()


def _raise_exit(signum: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds like Ctrl-C, so that every `with` block ends its own processes."""
    sys.exit(128 + signum)
