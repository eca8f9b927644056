"""sglang-router 0.3.2 in front of the servers of a run: one process, on loopback unless another host is given.

The owner adds a server once its weights are verified and removes it before it is stopped or replaced; the router sends
`/generate` and the OpenAI routes to the servers it has.

Invariants
1. `add_worker` returns only when the router itself lists the server as healthy, `remove_worker` only when it is gone.
2. The router's metrics port is leased like its own, and on loopback: its default would collide between two runs.
3. The router always has a key, and answers nobody without it, on any route but its health checks: else any user of the
   host could register a server of his own, and would be sent requests with the engines' key. The key is the engines',
   because the router hands on what a client sends. It travels in the environment, and is in no log.
"""

from __future__ import annotations

import json
import secrets
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError, DeadlineExceeded, EngineError
from slime.serving.launch import API_KEY_ENV, ROUTER_FLAG
from slime.serving.leased import LeasedServer
from slime.serving.plain_http import request
from slime.serving.ports import lease_port, lease_ports
from slime.serving.process import ChildProcess, python_module
from slime.serving.server import command_line_flags

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
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Worker:
    """A server as the router sees it."""

    id: str
    url: str
    healthy: bool


class Router(LeasedServer):
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
    ) -> None:
        """`port`: None takes a free one. `extra_args`: router arguments by field name (`args.router`); its `api_key` is
        what the router asks for, else `worker_api_key`, what the servers ask for, else one that is made here.
        """
        clash = sorted(_OWNED & (extra_args or {}).keys())
        if clash:
            raise ConfigError(f"got {clash} among the router arguments, which slime sets itself; leave them out")
        super().__init__(host=host, log_path=log_path)
        self._fixed_port = port
        self._extra = dict(extra_args or {})
        self.api_key: str = self._extra.pop("api_key", None) or worker_api_key or secrets.token_hex(32)
        """What every request carries as its bearer token."""
        self._worker_api_key = worker_api_key

    @property
    def url(self) -> str:
        """Where this host reaches the router. Raises `EngineError` before `start`."""
        host = _EVERYWHERE.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def start(self) -> None:
        """Starts the router process and returns at once. Raises `EngineError` if its fixed port is taken."""
        assert self._process is None, "the router was started twice; stop() it first"
        self._lease = lease_ports(1) if self._fixed_port is None else lease_port(self._fixed_port)
        self._metrics_lease = lease_ports(1)
        fields = {**DEFAULTS, **self._extra, "host": self.host, "port": self.port}
        fields |= {"prometheus_host": "127.0.0.1", "prometheus_port": self._metrics_lease.port}
        self._process = ChildProcess(
            f"router {self.url}",
            python_module("slime.serving.launch", [ROUTER_FLAG, *command_line_flags(fields)]),
            log_path=self.log_path,
            env={API_KEY_ENV: self.api_key, **NO_PROXIES},
        )
        self._process.start()

    def keep_port(self) -> None:
        """Every later start takes the port that it has now."""
        self._fixed_port = self.port

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Waits until the router answers. Raises `EngineError` with its log if it dies, else `DeadlineExceeded`."""
        if self._process is None:
            raise EngineError("wait_ready before start(): there is nothing to wait for")
        self._process.wait_until(
            lambda: request("GET", f"{self.url}/liveness", timeout_s=2)[0] == 200,
            what="it was ready",
            timeout_s=timeout_s,
        )

    def workers(self) -> list[Worker]:
        """The servers that the router knows. Raises `EngineError` if it does not answer."""
        status, text = request("GET", f"{self.url}/workers", api_key=self.api_key)
        if status != 200:
            raise EngineError(f"got status {status} from {self.url}/workers: {text[:500]}")
        return [
            Worker(id=str(w["id"]), url=str(w["url"]), healthy=bool(w["is_healthy"]))
            for w in json.loads(text)["workers"]
        ]

    def add_worker(self, url: str, timeout_s: float = 60.0) -> None:
        """Adds a server and waits until the router lists it as healthy.

        Raises `EngineError` if the router refuses, `DeadlineExceeded` if it does not register the server in time.
        """
        if any(w.url == url and w.healthy for w in self.workers()):
            return
        body = {"url": url} | ({"api_key": self._worker_api_key} if self._worker_api_key else {})
        status, text = request("POST", f"{self.url}/workers", body, timeout_s=timeout_s, api_key=self.api_key)
        if not 200 <= status < 300:
            raise EngineError(f"got status {status} from the router for the new server {url}: {text[:500]}")
        self._wait(lambda ws: any(w.url == url and w.healthy for w in ws), f"the router to register {url}", timeout_s)

    def remove_worker(self, url: str, timeout_s: float = 60.0) -> None:
        """Removes a server and waits until it is gone; one that is not there is not an error.

        Raises `EngineError` if the router refuses, `DeadlineExceeded` if the server stays.
        """
        for worker in self.workers():
            if worker.url != url:
                continue
            address = f"{self.url}/workers/{urllib.parse.quote(worker.id, safe='')}"
            status, text = request("DELETE", address, timeout_s=timeout_s, api_key=self.api_key)
            if not 200 <= status < 300 and status != 404:
                raise EngineError(f"got status {status} from the router for the removal of {url}: {text[:500]}")
        self._wait(lambda ws: all(w.url != url for w in ws), f"the router to forget {url}", timeout_s)

    def _wait(self, done: Any, for_what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            workers = self.workers()
            if done(workers):
                return
            if time.monotonic() > deadline:
                raise DeadlineExceeded.waiting(
                    owner=f"the owner of {self.url}",
                    for_what=for_what,
                    limit_s=timeout_s,
                    last_progress=f"it lists {workers}",
                )
            time.sleep(_POLL_S)

    def stop(self, timeout_s: float = 3.0) -> None:
        """Ends the router. May be called again. Raises `EngineError` if it survives SIGKILL."""
        if self._process is not None:
            self._process.stop(timeout_s)
            self._process = None
        if self._lease is not None:
            self._lease.release()
            self._metrics_lease.release()
            self._lease = None
