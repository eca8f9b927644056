"""The environment of a run's processes. Made before Ray is imported, which reads it once, then.

a Ray that the run starts        listens on loopback only, asks for a token that is made for the run, and hands the
                                 driver's whole environment down: its processes descend from the driver
a Ray cluster that runs already  keeps its own settings; processes start there with the environment of its own
                                 daemons, and get what they need by name (`for_actors`)
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import slime
from slime.core.processes import RUN_ID_ENV
from slime.serving.child_process import KEEP_ENVIRON_ENV

LOCAL_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would start one idle worker per core at once; a laptop needs exactly the actors of the plan.
    "RAY_prestart_worker_first_driver": "0",
    # Ray binds to the host's address unless it is configured as a single host; then it stays on 127.0.0.1.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # Ray gives its workers, and all that they start, a lower priority than anything else on the machine.
    "RAY_worker_niceness": "0",
    # Ray gives up a host whose daemon is silent for a minute. There is no other one here, and its end shows by itself.
    "RAY_health_check_failure_threshold": "60",
    # Ray keeps a record of each of the last 100,000 calls for its dashboard, which does not run: 21 kB a step.
    "RAY_task_events_report_interval_ms": "0",
}
"""Variables of a Ray cluster that serves one run on one machine."""

NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""As SGLang sets them in its own processes: with other values than the engine's, a trainer waits forever for the first
broadcast in the group of the weight sync."""

START_FOLDER_ENV = "SLIME_START_FOLDER"
"""Where the driver was started: processes of the run go there, so that relative paths mean the same everywhere."""
FORWARDED = (
    *("NCCL_", "GLOO_", "SGLANG_", "TORCH", "PYTORCH_", "TRITON_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_"),
    *(
        "GOMP_",
        "KMP_",
        "MKL_",
        "CUBLAS_",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING",
        "PYTHONHASHSEED",
        "MPLBACKEND",
    ),
)
"""Beginnings of names that mean the same on every host. Others have to be named: --forward-env-vars."""
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY")
"""In a name: what is never handed on unasked, because Ray shows it. (`TOKENIZERS_...` is none.)"""
SETUP_HOOK = "slime.cluster.environment.enter_start_folder"
logger = logging.getLogger(__name__)


def prepare_environment(run_id: str, *, ray_address: str | None = None) -> None:
    """Marks this process and all that it starts with `run_id`, and sets up NCCL, and Ray for one machine.

    `ray_address`: of the cluster that the run joins; its own settings are left alone.
    """
    os.environ[RUN_ID_ENV] = run_id
    for name, value in NCCL.items():
        os.environ.setdefault(name, value)
    if ray_address is not None:
        return
    assert "ray" not in sys.modules, "Ray was imported before its environment was made; it would ignore it"
    for name, value in LOCAL_RAY.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def for_actors(environment: Mapping[str, str], *, named: Sequence[str] = ()) -> dict[str, str]:
    """What processes on a cluster that runs already take from the driver: variables, and where modules of ours and of
    the user's are. `named`: further variables of the user's choice.
    """
    chosen = {
        name: value
        for name, value in environment.items()
        if name in named or (name.startswith(FORWARDED) and not _is_secret(name))
    }
    root = str(Path(slime.__file__).resolve().parent.parent)
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys(p for p in (root, *_own_folders(sys.path), *given) if p)
    chosen |= {RUN_ID_ENV: environment[RUN_ID_ENV], KEEP_ENVIRON_ENV: "1"}
    return chosen | {"PYTHONPATH": os.pathsep.join(paths), START_FOLDER_ENV: os.getcwd()}


def _own_folders(import_path: Sequence[str]) -> list[str]:
    """Of an import path what no Python installation brings."""
    brought = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    return [os.path.abspath(p) for p in import_path if os.path.isdir(p) and not os.path.abspath(p).startswith(brought)]


def _is_secret(name: str) -> bool:
    return any(word in name.split("_") for word in _SECRET)


def enter_start_folder() -> None:
    """Every process of the run on a cluster calls this first. If the folder is not there, the check of the shared
    folders says so, with the host."""
    folder = os.environ.get(START_FOLDER_ENV)
    if folder:
        try:
            os.chdir(folder)
        except OSError as error:
            logger.warning("the folder of the start is not on this host: %s", error)
