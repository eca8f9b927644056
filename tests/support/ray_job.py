"""A run as a job of a Ray cluster, submitted and stopped by Ray's own manager of jobs.

`cluster` is a block with a Ray of one host that knows nothing of runs. As a script this file is what `ray job submit`
and `ray job stop` are: it submits `train.py` with its own arguments, and stops the job when it gets SIGTERM. The
commands themselves speak to Ray's dashboard, which wants more packages; behind it stands the same manager.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HEAD = """
import sys, ray
num_cpus, folder = sys.argv[1:]
ray.init("local", num_cpus=int(num_cpus), include_dashboard=False, log_to_driver=False, _temp_dir=folder)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
LOOK_S = 0.2


@contextmanager
def cluster(folder: Path, *, num_cpus: int) -> Iterator[dict[str, str]]:
    """The environment by which drivers find it. `folder`: short, for sockets are in it."""
    env = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    head = [sys.executable, "-c", HEAD, str(num_cpus), str(folder)]
    with subprocess.Popen(
        head, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
    ) as process:
        assert process.stdin is not None and process.stdout is not None, "no pipes"
        address = process.stdout.readline().strip()
        assert address, "Ray did not start"
        yield {**env, "RAY_ADDRESS": address}
        process.stdin.close()


async def _run(entrypoint: str) -> str:
    import ray
    from ray.dashboard.modules.job.job_manager import JobManager

    ray.init(log_to_driver=False)
    worker = ray._private.worker.global_worker
    manager = JobManager(worker.gcs_client, worker.node.get_logs_dir_path())
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    job = await manager.submit_job(entrypoint=entrypoint)
    asked = False
    while not (status := await manager.get_job_status(job)).is_terminal():
        if stop.is_set() and not asked:
            asked = manager.stop_job(job)
        await asyncio.sleep(LOOK_S)
    log = Path(worker.node.get_logs_dir_path()) / f"job-driver-{job}.log"
    print(log.read_text() if log.exists() else "", status, sep="\n", flush=True)
    return str(status)


if __name__ == "__main__":
    asyncio.run(_run(shlex.join([sys.executable, "train.py", *sys.argv[1:]])))
