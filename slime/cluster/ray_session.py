"""One run's processes, from the first to the last: its guardian and its Ray cluster.

`guarded` is the outer block, `RaySession` the inner one; what has processes of its own and outlives Ray stands between
them (the views: W&B). The environment is made before (`environment.py`). With `--ray-address` or `RAY_ADDRESS` the run
joins that cluster, whose daemons it leaves alone; its processes on other hosts have guardians of their own (`hosts`).
They wait for Ray to start and for the guardian to end all that is left; the only thing that reaches them from outside
is SIGTERM, which becomes an exception.

Invariants
1. The guardian starts before the first process that it may have to end, and outlives the driver.
2. Whatever ends the driver (return, exception, Ctrl-C, SIGTERM, SIGKILL), nothing of the run is left.
3. After a return, an exception or Ctrl-C the guardian ends only what is left when everything else has ended by itself.
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

from slime.cluster.driver import SETUP_HOOK, for_actors
from slime.cluster.guardian import Guardian, start_guardian
from slime.core.blame import error_line
from slime.core.errors import ActorFailed, ClusterFailed, Terminated
from slime.core.hf_config import read_hf_config
from slime.core.processes import ray_folder
from slime.settings import Args
from slime.settings.groups.training import longest_sample

logger = logging.getLogger(__name__)

SLOW_START = "timed out during startup"
"""In Ray's message (2.60)."""
LEAST_STORE_BYTES = 512 * 2**20
"""Object store of a local run, at least."""
BYTES_PER_TOKEN = 32
"""Of a batch at most (`core.batch`), but for routed experts: ids, mask, log-probs of two policies, versions."""
NUM_BATCHES = 3
"""In the store at once: two steps, and what is about to be freed."""
MEMORY_SHARE = 0.3
"""Of the host's memory, and of its shared memory, that the store may be at most."""


def store_bytes_for(args: Args) -> int:
    """Size of the object store for the batches of a run, within what this host has. Its pages are taken when used."""
    num_samples = args.rollout_batch_size * args.n_samples_per_prompt
    length = longest_sample(args)
    shared = os.statvfs("/dev/shm")
    room = min(psutil.virtual_memory().total, shared.f_blocks * shared.f_frsize)
    wanted = num_samples * length * (BYTES_PER_TOKEN + _bytes_of_experts(args)) * NUM_BATCHES
    return max(LEAST_STORE_BYTES, min(wanted, int(room * MEMORY_SHARE)))


def _bytes_of_experts(args: Args) -> int:
    """Of a token's routed experts, at most, where engines tell them."""
    if not args.sglang.get("enable_return_routed_experts"):
        return 0
    config = read_hf_config(args.hf_checkpoint)
    return int(config["num_hidden_layers"]) * int(config["num_experts_per_tok"]) * np.dtype(np.int16).itemsize


def _closed_folder(run_id: str) -> Path:
    """Where a local Ray puts its files. Raises `ClusterFailed` if another user's folder is in its place."""
    around = ray_folder(run_id)
    around.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = around.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ClusterFailed(f"got {around}, which somebody else made; start the run again, under another name")
    around.chmod(0o700)
    return around / "r"  # Ray makes it, and opens it to everybody


@contextmanager
def guarded(run_id: str, *, log_path: Path, own_ray: bool = True) -> Iterator[Guardian]:
    """Nothing of the run outlives the block on this host, nor this process.

    `log_path`: where the guardian writes what it did. `own_ray`: the run starts its own Ray.
    """
    temp_dirs = [str(ray_folder(run_id))] if own_ray else []
    guardian = start_guardian(run_id, temp_dirs=temp_dirs, log_path=log_path)
    try:
        yield guardian
    finally:
        guardian.close()


class RaySession:
    """Context manager around the Ray cluster of one run, which it starts on this host."""

    def __init__(self, run_id: str, *, num_cpus: int, num_gpus: int, store_bytes: int = LEAST_STORE_BYTES) -> None:
        """`num_cpus`, `num_gpus`: what the cluster has to give; `store_bytes`: size of its object store."""
        self.run_id = run_id
        self._num_cpus, self._num_gpus, self._store_bytes = num_cpus, num_gpus, store_bytes
        self._is_terminated = False

    def __enter__(self) -> RaySession:
        self._start()
        signal.signal(signal.SIGTERM, self._terminate)  # Ray puts a handler of its own there when it starts
        return self

    def _start(self) -> None:
        _start_local(self.run_id, self._num_cpus, self._num_gpus, self._store_bytes)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ray.shutdown()
        if self._is_terminated and not isinstance(exc, Terminated):
            # Ray makes an exit of its own of what a signal raises while it waits; or the end of another process, which
            # got the signal, too, was seen first.
            raise Terminated(128 + signal.SIGTERM) from exc

    def _terminate(self, signum: int, frame: FrameType | None) -> None:
        """SIGTERM unwinds like Ctrl-C, so that every `with` block ends its own processes; once is enough."""
        if not self._is_terminated:
            self._is_terminated = True
            raise Terminated(128 + signum)


class JoinedRay(RaySession):
    """Context manager around a run's use of the cluster of `args.ray_address`; its daemons are left alone."""

    def __init__(self, args: Args) -> None:
        super().__init__(args.run_id, num_cpus=0, num_gpus=0)
        self._args = args

    def _start(self) -> None:
        """Raises `ActorFailed` if the cluster does not take the driver."""
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
            f"got no Ray cluster at {args.ray_address}: {error_line(error)}; run the driver on one of its hosts, with "
            "the Ray and Python versions of the cluster, and with its RAY_AUTH_MODE and RAY_AUTH_TOKEN"
        ) from error


def _start_local(run_id: str, num_cpus: int, num_gpus: int, store_bytes: int) -> None:
    """Raises `ClusterFailed` if Ray does not start: it gives its own processes 30 s, too few on a busy machine."""
    for last in (False, False, True):
        try:
            _init_local(run_id, num_cpus, num_gpus, store_bytes)
            return
        except Exception as error:
            ray.shutdown()
            if last or SLOW_START not in str(error):
                raise ClusterFailed(
                    f"Ray did not start: {error_line(error)}; look at the load and the free memory of this machine"
                ) from error
            logger.warning("Ray did not start in 30 s on this busy machine; again")


def _init_local(run_id: str, num_cpus: int, num_gpus: int, store_bytes: int) -> None:
    ray.init(
        address="local",  # whatever RAY_ADDRESS says
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=store_bytes,
        namespace=f"slime-{run_id}",
        _temp_dir=str(_closed_folder(run_id)),
    )
