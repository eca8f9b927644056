"""sglang-router 0.3.2 in front of the servers of a run: one process, on loopback unless another host is given.

The owner adds a server once its weights are verified and removes it before it is stopped or replaced; the router sends
`/generate` and the OpenAI routes to the servers it has.

Invariants
1. The router's metrics port is leased like its own, and on loopback: its default would collide between two runs.
2. The router always has a key, and answers nobody without it, on any route but its health checks: else any user of the
   host could register a server of his own, and would be sent requests with the engines' key. The key is the engines',
   because the router hands on what a client sends. It travels in the environment, and is in no log.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError, EngineError
from slime.core.processes import http_url, in_brackets
from slime.serving.launch import API_KEY_ENV, ROUTER_FLAG
from slime.serving.leased import LeasedServer
from slime.serving.plain_http import request
from slime.serving.ports import lease_port, lease_ports
from slime.serving.process import ChildProcess, python_module
from slime.serving.router_workers import RouterWorkers
from slime.serving.server import without_secrets

DEFAULTS: Mapping[str, Any] = {
    "worker_startup_check_interval": 1,
    "shutdown_grace_period_secs": 1,
    "health_check_interval_secs": 10,
    "log_level": "warn",
    # A request that was sent twice is sampled twice; the rollout client decides about retries, and counts them.
    "disable_retries": True,
    # A server that pauses for a weight sync is slow, not broken; whether it lives is watched elsewhere.
    "disable_circuit_breaker": True,
}
_OWNED = frozenset({"host", "port", "prometheus_port", "prometheus_host", "worker_urls"})
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""An address that stands for all of this host's -> one of them, to ask."""
NO_PROXIES = {
    name: None for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
}
"""Variables that the router does not get: all that it reaches are engines of the run, on other hosts as well."""


class Router(LeasedServer, RouterWorkers):
    """One router and its life."""

    what = "the router"

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        log_path: str | Path,
        extra_args: Mapping[str, Any] | None = None,
        worker_api_key: str | None = None,
        pairs: bool = False,
    ) -> None:
        """`port`: None takes a free one. `extra_args`: router arguments by field name (`args.router`); its `api_key` is
        what the router asks for, else `worker_api_key`, what the servers ask for, else one that is made here. `pairs`:
        it sends each request to a prefill and a decode server.
        """
        clash = sorted(_OWNED & (extra_args or {}).keys())
        if clash:
            raise ConfigError(f"got {clash} among the router arguments, which slime sets itself; leave them out")
        super().__init__(host=host, log_path=log_path)
        self._fixed_port = port
        self._extra = dict(extra_args or {})
        self.api_key = self._extra.pop("api_key", None) or worker_api_key or secrets.token_hex(32)
        self._worker_api_key = worker_api_key
        self._pairs = pairs

    @property
    def url(self) -> str:
        """Where this host reaches the router. Raises `EngineError` before `start`."""
        return http_url(_EVERYWHERE.get(self.host, self.host), self.port)

    def start(self) -> None:
        """Starts the router process and returns at once. Raises `EngineError` if its fixed port is taken."""
        assert self._process is None, "the router was started twice; stop() it first"
        self._lease = lease_ports(1) if self._fixed_port is None else lease_port(self._fixed_port)
        self._metrics_lease = lease_ports(1)
        fields = {**DEFAULTS, **self._extra, "host": in_brackets(self.host), "port": self.port}
        fields |= {"pd_disaggregation": True} if self._pairs else {}
        fields |= {"prometheus_host": "127.0.0.1", "prometheus_port": self._metrics_lease.port}
        flags, secret = without_secrets(fields)
        self._process = ChildProcess(
            f"router {self.url}",
            python_module("slime.serving.launch", [ROUTER_FLAG, *flags]),
            log_path=self.log_path,
            env={API_KEY_ENV: self.api_key, **NO_PROXIES, **secret},
        )
        self._process.start()

    def keep_port(self) -> None:
        """Every later start takes the port that it has now."""
        self._fixed_port = self.port

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Waits until the router answers. Raises `EngineError` with its log if it dies, else `DeadlineExceeded`."""
        process = self._process  # another thread may end it meanwhile
        if process is None:
            raise EngineError("wait_ready before start(): there is nothing to wait for")
        process.wait_until(
            lambda: request("GET", f"{self.url}/liveness", timeout_s=2)[0] == 200,
            what="it was ready",
            timeout_s=timeout_s,
        )

    def stop(self, timeout_s: float = 3.0) -> None:
        """Ends the router. May be called again. Raises `EngineError` if it survives SIGKILL."""
        if self._process is not None:
            self._process.stop(timeout_s)
            self._process = None
        if self._lease is not None:
            self._lease.release()
            self._metrics_lease.release()
            self._lease = None
