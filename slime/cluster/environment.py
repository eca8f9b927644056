"""The environment that every process of a run inherits. Made before Ray is imported, which reads it once, then.

On one machine Ray listens on loopback only and asks for a token that is made for the run. To use a cluster that runs
already, set RAY_ADDRESS; its own settings are then left alone.
"""

from __future__ import annotations

import os
import secrets
import sys

from slime.core.ids import RUN_ID_ENV

LOCAL_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would start one idle worker per core at once; a laptop needs exactly the actors of the plan.
    "RAY_prestart_worker_first_driver": "0",
    # Ray binds to the host's address unless it is configured as a single host; then it stays on 127.0.0.1.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # Ray gives its workers, and all that they start, a lower priority than anything else on the machine.
    "RAY_worker_niceness": "0",
}
"""Variables of a Ray cluster that serves one run on one machine."""

NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""As SGLang sets them in its own processes: with other values than the engine's, a trainer waits forever for the first
broadcast in the group of the weight sync."""


def prepare_environment(run_id: str) -> None:
    """Marks this process and all that it starts with `run_id`, and sets up NCCL, and Ray for one machine."""
    os.environ[RUN_ID_ENV] = run_id
    for name, value in NCCL.items():
        os.environ.setdefault(name, value)
    if os.environ.get("RAY_ADDRESS"):
        return
    assert "ray" not in sys.modules, "Ray was imported before its environment was made; it would ignore it"
    for name, value in LOCAL_RAY.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
