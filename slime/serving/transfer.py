"""How an engine that reads prompts hands keys and values to one that samples: SGLang's transfer backends.

`--sglang-disaggregation-transfer-backend` says which; the default is Mooncake, on a CPU over TCP. A backend is a
package that SGLang loads when an engine of a pair starts, and Mooncake's needs libraries of the system as well.

Invariants
1. Whoever would start an engine of a pair learns first what is missing here, and what to install.
2. Engines of a run on one host exchange addresses on loopback. Mooncake's own two ports listen on every interface
   nevertheless, whatever its settings say (docs/topologies.md says what that means).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from slime.core.errors import START_FLAG, ConfigError
from slime.core.topology import PAIRED, Worker

MODULES: Mapping[str, str] = {
    "mooncake": "mooncake.engine",
    "mooncake_tcp": "mooncake.engine",
    "nixl": "nixl._api",
    "mori": "mori",
}
"""Backend -> what SGLang 0.5.16 imports for it; others have no name here."""
DEFAULT = "mooncake"
SYSTEM_LIBRARIES = "libibverbs1 libnuma1 libcurl4"
"""Packages of Debian and Ubuntu that hold what Mooncake's library loads."""
PATIENT: Mapping[str, str] = dict.fromkeys(
    ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"), "86400"
)
"""Seconds after which SGLang gives up a request whose other engine has no room for it, by itself 300. That is nothing
beside answers of many thousand tokens; who waits for a request has a limit of his own (`--request-timeout-s`)."""
ON_A_CPU: Mapping[str, str] = {
    "MOONCAKE_PROTOCOL": "tcp",
    # It would send the cached part of a prompt early, and waits for that with an event of CUDA: the scheduler of an
    # engine without a GPU dies of the second prompt that begins like an earlier one (seen with 0.5.16).
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
}
"""Environment of an engine of a pair."""
IMPORT_LIMIT_S = 600.0
"""By default, of a backend."""


def backend_of(extra: Mapping[str, Any]) -> str:
    """The backend of an engine with these ServerArgs."""
    return str(extra.get("disaggregation_transfer_backend") or DEFAULT)


def server_arguments(worker: Worker, bootstrap_port: int | None) -> dict[str, Any]:
    """ServerArgs by field name that make an engine what it is. `bootstrap_port`: of one that reads prompts."""
    if worker not in PAIRED:
        return {}
    port = {"disaggregation_bootstrap_port": bootstrap_port} if worker is Worker.PREFILL else {}
    return {"disaggregation_mode": worker.value, **port}


def environment(worker: Worker, device: str, host: str) -> dict[str, str]:
    """Additions to the environment of an engine that listens on `host`; what the user has set stays."""
    if worker not in PAIRED:
        return {}
    wanted = {"SGLANG_HOST_IP": host, **PATIENT, **(ON_A_CPU if device == "cpu" else {})}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def missing_here(backend: str, device: str, limit_s: float = IMPORT_LIMIT_S) -> str | None:
    """Why SGLang cannot load a backend on this host, and what to do; None if it can. Takes a fraction of a second."""
    module = MODULES.get(backend)
    if module is None:
        return None
    command = [sys.executable, "-c", f"import {module}"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return (
            f"python did not import {module} within {limit_s:.0f} s ({START_FLAG} raises the limit); is the disk slow?"
        )
    if run.returncode == 0:
        return None
    said = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
    if "shared object file" in said and module == MODULES[DEFAULT]:
        return f"{said}; do: apt-get install {SYSTEM_LIBRARIES}"
    if module != MODULES[DEFAULT]:
        return f"{said}; do: install the package that SGLang's documents name for the backend {backend}"
    package = "mooncake-transfer-engine-non-cuda" if device == "cpu" else "mooncake-transfer-engine"
    return f"{said}; do: pip install {package} (make venv does it for a CPU)"


def pair_problem(worker: Worker, extra: Mapping[str, Any], device: str, limit_s: float = IMPORT_LIMIT_S) -> str | None:
    """Why an engine with these ServerArgs could not start on this host; None if it is of no pair, or could."""
    if worker not in PAIRED:
        return None
    backend = backend_of(extra)
    missing = missing_here(backend, device, limit_s)
    if missing is None:
        return None
    return f"got a {worker.value} engine, which needs the transfer backend {backend}, and that does not load: {missing}"


def require_transfer(worker: Worker, extra: Mapping[str, Any], device: str) -> None:
    """Raises `ConfigError` if an engine could not start on this host for want of a way to the other of its pair."""
    if (problem := pair_problem(worker, extra, device)) is not None:
        raise ConfigError(problem)
