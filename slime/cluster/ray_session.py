"""Context managers for a run's guardian and Ray cluster.

`guarded` is the outer block, and `RaySession` or `JoinedRay` the inner one. Views with processes that outlive Ray (W&B)
are entered between the two. `slime.cluster.launch_run` sets the environment first. With `--ray-address` or
`RAY_ADDRESS`, the run joins that cluster and leaves its daemons alone. SIGTERM is converted to an exception, or, with
`--exit-signal-handler`, to a request to stop after the current step (`slime.cluster.restarting`).

Invariants
1. The guardian starts before any process that it may have to kill, and outlives the driver.
2. No process of the run is left after the driver exits, whether by return, exception, Ctrl-C, SIGTERM or SIGKILL.
3. After a return, an exception or Ctrl-C, processes have time to stop cleanly before the guardian kills the rest.
"""

from __future__ import annotations

import logging
import os
import signal
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

import numpy as np
import psutil
import ray

from slime.cluster.guardian import Guardian, start_guardian
from slime.cluster.launch_run import SETUP_HOOK, for_actors
from slime.cluster.restarting import stop_request
from slime.core.blame import error_line
from slime.core.errors import ActorFailed, ClusterFailed, Terminated
from slime.core.hf_config import read_hf_config
from slime.core.processes import ray_folder
from slime.settings import Args
from slime.settings.groups.training import longest_sample

logger = logging.getLogger(__name__)

SLOW_START = "timed out during startup"
"""Part of Ray's error message for a slow start (2.60)."""
LEAST_STORE_BYTES = 512 * 2**20
BYTES_PER_TOKEN = 32
"""Upper bound on the bytes per token of a batch (`core.batch`) without routed experts: id, mask, log-probs, version,
rewards."""
NUM_BATCHES = 3
"""Number of batches in the store at the same time: those of two steps and one that is about to be freed."""
MEMORY_SHARE = 0.3
"""Maximum fraction of the host's memory, and of its shared memory, that the store may use."""


def store_bytes_for(args: Args) -> int:
    """Returns the object store size required for a run's batches, limited by this host's memory.

    Unused pages of the store do not take up memory.
    """
    num_samples = args.rollout_batch_size * args.n_samples_per_prompt
    length = longest_sample(args)
    shared = os.statvfs("/dev/shm")
    room = min(psutil.virtual_memory().total, shared.f_blocks * shared.f_frsize)
    wanted = num_samples * length * (BYTES_PER_TOKEN + _bytes_of_experts(args)) * NUM_BATCHES
    return max(LEAST_STORE_BYTES, min(wanted, int(room * MEMORY_SHARE)))


def _bytes_of_experts(args: Args) -> int:
    """Returns the maximum number of bytes per token for routed experts. 0 if engines do not return them."""
    if not args.sglang.get("enable_return_routed_experts"):
        return 0
    config = read_hf_config(args.hf_checkpoint)
    return int(config["num_hidden_layers"]) * int(config["num_experts_per_tok"]) * np.dtype(np.int16).itemsize


def _closed_folder(run_id: str) -> Path:
    """Creates the folder for the local Ray's files, which only this user can access.

    Raises `ClusterFailed` if the folder belongs to another user.
    """
    around = ray_folder(run_id)
    around.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = around.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ClusterFailed(f"the folder {around} belongs to another user; start the run again with a new run id")
    around.chmod(0o700)
    return around / "r"  # Ray makes this folder accessible to all users, so it must be inside a private one


@contextmanager
def guarded(run_id: str, *, log_path: Path, own_ray: bool = True) -> Iterator[Guardian]:
    """Starts a guardian, which ensures that no process of the run on this host outlives the block or this process.

    `own_ray`: the run starts its own Ray, so the guardian also removes Ray's folder.
    """
    temp_dirs = [str(ray_folder(run_id))] if own_ray else []
    guardian = start_guardian(run_id, temp_dirs=temp_dirs, log_path=log_path)
    try:
        yield guardian
    finally:
        guardian.close()


class RaySession:
    """A Ray cluster that the run starts on this host."""

    def __init__(
        self,
        run_id: str,
        *,
        num_cpus: int,
        num_gpus: int,
        store_bytes: int = LEAST_STORE_BYTES,
        stops_early: bool = False,
    ) -> None:
        """`stops_early`: SIGTERM only asks the run to stop after its step, unless the run has been asked before."""
        self.run_id = run_id
        self._stops_early = stops_early
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
            # Ray replaces the signal's exception with its own while it waits. Another possibility is that the exit of
            # another process that received the signal raised an error first.
            raise Terminated(128 + signal.SIGTERM) from exc

    def _terminate(self, signum: int, frame: FrameType | None) -> None:
        """Raises `Terminated` on the first SIGTERM, so that all `with` blocks stop their processes, as on Ctrl-C."""
        if not self._is_terminated and not (self._stops_early and stop_request().takes(signum)):
            self._is_terminated = True
            raise Terminated(128 + signum)


class JoinedRay(RaySession):
    """An existing Ray cluster that the run joins, at `args.ray_address`. Its daemons keep running."""

    def __init__(self, args: Args) -> None:
        super().__init__(args.run_id, num_cpus=0, num_gpus=0, stops_early=args.exit_signal_handler)
        self._args = args

    def _start(self) -> None:
        """Joins the cluster. Raises `ActorFailed` if that fails."""
        assert self._args.ray_address is not None, "no cluster to join"
        join_cluster(self._args.ray_address, self._args.run_id, forwarded=self._args.forward_env_vars)


def join_cluster(address: str, run_id: str, *, forwarded: Sequence[str] = ()) -> None:
    """Joins the cluster. `forwarded`: additional variables for its processes. Raises `ActorFailed` if that fails."""
    variables = for_actors(os.environ, named=forwarded)
    try:
        ray.init(
            address=address,
            namespace=f"slime-{run_id}",
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": variables, "worker_process_setup_hook": SETUP_HOOK},
        )
    except Exception as error:
        ray.shutdown()
        raise ActorFailed(
            f"cannot join the Ray cluster at {address}: {error_line(error)}; run the driver on one of its "
            "hosts, with the cluster's Ray and Python versions, RAY_AUTH_MODE and RAY_AUTH_TOKEN"
        ) from error


def _start_local(run_id: str, num_cpus: int, num_gpus: int, store_bytes: int) -> None:
    """Starts Ray. Raises `ClusterFailed` if that fails.

    Tries up to three times if Ray is slow to start: its own timeout of 30 s is too short on a busy machine.
    """
    for last in (False, False, True):
        try:
            _init_local(run_id, num_cpus, num_gpus, store_bytes)
            return
        except Exception as error:
            ray.shutdown()
            if last or SLOW_START not in str(error):
                raise ClusterFailed(
                    f"Ray did not start: {error_line(error)}; check this machine's load and free memory"
                ) from error
            logger.warning("Ray did not start within 30 s on this busy machine; retrying")


def _init_local(run_id: str, num_cpus: int, num_gpus: int, store_bytes: int) -> None:
    with _without_job_servers():
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


@contextmanager
def _without_job_servers() -> Iterator[None]:
    """Starts Ray as if `ray[default]` were not installed.

    Otherwise, its dashboard and the agent of each host listen for jobs, even without a dashboard (Ray 2.60), and answer
    every user of this host. Only clusters that users start themselves need them.
    """
    from ray._private import utils

    find = utils.get_dashboard_dependency_error
    utils.get_dashboard_dependency_error = lambda: ImportError("a run's own cluster takes no jobs")
    try:
        yield
    finally:
        utils.get_dashboard_dependency_error = find
