"""Context managers for the guardian and the Ray cluster of one run.

`guarded` is the outer block, `RaySession` or `JoinedRay` the inner one. Between them are views with processes that
outlive Ray (W&B). `slime.cluster.launch_run` sets the environment before both. With `--ray-address` or `RAY_ADDRESS`
the run joins that cluster and does not touch its daemons. SIGTERM becomes an exception.

Invariants
1. The guardian starts before any process that it may have to kill, and outlives the driver.
2. No process of the run is left after the driver exits, by return, exception, Ctrl-C, SIGTERM or SIGKILL.
3. After a return, an exception or Ctrl-C, processes have time to stop in order before the guardian kills the rest.
"""

from __future__ import annotations

import logging
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

import numpy as np
import psutil
import ray

from slime.cluster.guardian import Guardian, start_guardian
from slime.cluster.launch_run import SETUP_HOOK, for_actors
from slime.core.blame import error_line
from slime.core.errors import ActorFailed, ClusterFailed, Terminated
from slime.core.hf_config import read_hf_config
from slime.core.processes import ray_folder
from slime.settings import Args
from slime.settings.groups.training import longest_sample

logger = logging.getLogger(__name__)

SLOW_START = "timed out during startup"
"""A part of Ray's error message for a slow start (2.60)."""
LEAST_STORE_BYTES = 512 * 2**20
BYTES_PER_TOKEN = 32
"""Upper bound in bytes for a token in a batch (`core.batch`), without routed experts: id, mask, log-probs, version."""
NUM_BATCHES = 3
"""Number of batches in the store at the same time: those of two steps, and one that is about to be freed."""
MEMORY_SHARE = 0.3
"""Largest share of the host's memory, and of its shared memory, that the store may take."""


def store_bytes_for(args: Args) -> int:
    """Returns the size of the object store for a run's batches, limited by this host's memory.

    Unused pages of the store take no memory.
    """
    num_samples = args.rollout_batch_size * args.n_samples_per_prompt
    length = longest_sample(args)
    shared = os.statvfs("/dev/shm")
    room = min(psutil.virtual_memory().total, shared.f_blocks * shared.f_frsize)
    wanted = num_samples * length * (BYTES_PER_TOKEN + _bytes_of_experts(args)) * NUM_BATCHES
    return max(LEAST_STORE_BYTES, min(wanted, int(room * MEMORY_SHARE)))


def _bytes_of_experts(args: Args) -> int:
    """Returns the maximum number of bytes of a token's routed experts; 0 if engines do not return them."""
    if not args.sglang.get("enable_return_routed_experts"):
        return 0
    config = read_hf_config(args.hf_checkpoint)
    return int(config["num_hidden_layers"]) * int(config["num_experts_per_tok"]) * np.dtype(np.int16).itemsize


def _closed_folder(run_id: str) -> Path:
    """Creates the folder for the files of a local Ray. Only this user can enter the folder.

    Raises `ClusterFailed` if the folder belongs to another user.
    """
    around = ray_folder(run_id)
    around.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = around.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ClusterFailed(f"the folder {around} belongs to a different user; start the run again, under a new name")
    around.chmod(0o700)
    return around / "r"  # Ray makes this folder accessible to every user, so it is inside the closed one


@contextmanager
def guarded(run_id: str, *, log_path: Path, own_ray: bool = True) -> Iterator[Guardian]:
    """Starts a guardian, so that no process of the run on this host outlives the block or this process.

    `own_ray` is whether the run starts its own Ray; then the guardian also removes Ray's folder.
    """
    temp_dirs = [str(ray_folder(run_id))] if own_ray else []
    guardian = start_guardian(run_id, temp_dirs=temp_dirs, log_path=log_path)
    try:
        yield guardian
    finally:
        guardian.close()


class RaySession:
    """A Ray cluster that the run starts on this host."""

    def __init__(self, run_id: str, *, num_cpus: int, num_gpus: int, store_bytes: int = LEAST_STORE_BYTES) -> None:
        self.run_id = run_id
        self._num_cpus, self._num_gpus, self._store_bytes = num_cpus, num_gpus, store_bytes
        self._is_terminated = False

    def __enter__(self) -> RaySession:
        self._start()
        signal.signal(signal.SIGTERM, self._terminate)  # Ray's start installs its own handler
        return self

    def _start(self) -> None:
        _start_local(self.run_id, self._num_cpus, self._num_gpus, self._store_bytes)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ray.shutdown()
        if self._is_terminated and not isinstance(exc, Terminated):
            # While Ray waits, it replaces the signal's exception with its own. Or a different process got the same
            # signal, and its exit raised an error first.
            raise Terminated(128 + signal.SIGTERM) from exc

    def _terminate(self, signum: int, frame: FrameType | None) -> None:
        """Raises `Terminated` at the first SIGTERM, so that every `with` block stops its processes as after Ctrl-C."""
        if not self._is_terminated:
            self._is_terminated = True
            raise Terminated(128 + signum)


class JoinedRay(RaySession):
    """Joins the cluster at `args.ray_address`. Leaves its daemons running."""

    def __init__(self, args: Args) -> None:
        super().__init__(args.run_id, num_cpus=0, num_gpus=0)
        self._args = args

    def _start(self) -> None:
        """Joins the cluster. Raises `ActorFailed` if that fails."""
        _join(self._args)


def _join(args: Args) -> None:
    variables = for_actors(os.environ, named=args.forward_env_vars)
    try:
        ray.init(
            address=args.ray_address,
            namespace=f"slime-{args.run_id}",
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": variables, "worker_process_setup_hook": SETUP_HOOK},
        )
    except Exception as error:
        ray.shutdown()
        raise ActorFailed(
            f"cannot join the Ray cluster at {args.ray_address}: {error_line(error)}; run the driver on one of its "
            "hosts, with the Ray and Python versions of the cluster, and with its RAY_AUTH_MODE and RAY_AUTH_TOKEN"
        ) from error


def _start_local(run_id: str, num_cpus: int, num_gpus: int, store_bytes: int) -> None:
    """Starts Ray. Raises `ClusterFailed` if that fails.

    Tries a slow start three times, because Ray waits only 30 s for its processes, which is too short on a busy machine.
    """
    for last in (False, False, True):
        try:
            _init_local(run_id, num_cpus, num_gpus, store_bytes)
            return
        except Exception as error:
            ray.shutdown()
            if last or SLOW_START not in str(error):
                raise ClusterFailed(
                    f"Ray did not start: {error_line(error)}; check the load and the free memory of this machine"
                ) from error
            logger.warning("Ray did not start within 30 s on this busy machine; trying again")


def _init_local(run_id: str, num_cpus: int, num_gpus: int, store_bytes: int) -> None:
    ray.init(
        address="local",  # ignores RAY_ADDRESS
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=store_bytes,
        namespace=f"slime-{run_id}",
        _temp_dir=str(_closed_folder(run_id)),
    )
