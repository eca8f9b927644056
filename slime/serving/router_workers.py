"""The servers of a router, over sglang-router 0.3.2's own routes: `Router` is one that the run starts, `ExistingRouter`
one that runs already. It does what it is asked in its own time: `workers` says what it has.
"""

from __future__ import annotations

import json
import urllib.parse
from dataclasses import dataclass
from typing import Any

from slime.core.errors import EngineError
from slime.core.processes import http_url
from slime.core.topology import Worker as Kind
from slime.core.topology import bootstrap_of
from slime.serving.plain_http import request


@dataclass(frozen=True, slots=True)
class Worker:
    """A server as the router sees it."""

    id: str
    url: str
    healthy: bool


class RouterWorkers:
    """What can be asked of a router, whoever started it."""

    api_key: str
    """What every request carries as its bearer token."""
    _worker_api_key: str | None
    """What the servers ask for."""

    @property
    def url(self) -> str:
        """Where this host reaches the router."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """Whether there is somebody to ask."""
        raise NotImplementedError

    def workers(self) -> list[Worker]:
        """The servers that the router knows. Raises `EngineError` if it does not answer."""
        status, text = request("GET", f"{self.url}/workers", api_key=self.api_key)
        if status != 200:
            raise EngineError(f"got status {status} from {self.url}/workers: {text[:500]}")
        return [
            Worker(id=str(w["id"]), url=str(w["url"]), healthy=bool(w["is_healthy"]))
            for w in json.loads(text)["workers"]
        ]

    def ask_to_add(self, url: str, timeout_s: float, kind: Kind) -> None:
        """Has the router add a server as soon as that answers. Raises `EngineError` if it refuses, or is silent."""
        body: dict[str, Any] = {"url": url} | ({"api_key": self._worker_api_key} if self._worker_api_key else {})
        if kind is not Kind.REGULAR:
            body["worker_type"] = kind.value
        if kind is Kind.PREFILL:
            body["bootstrap_port"] = bootstrap_of(url)[1]
        status, text = request("POST", f"{self.url}/workers", body, timeout_s=timeout_s, api_key=self.api_key)
        if not 200 <= status < 300:
            raise EngineError(f"got status {status} from the router for the new server {url}: {text[:500]}")

    def ask_to_remove(self, worker: Worker, timeout_s: float) -> None:
        """Has the router remove a server. Raises `EngineError` if it refuses, or is silent."""
        address = f"{self.url}/workers/{urllib.parse.quote(worker.id, safe='')}"
        status, text = request("DELETE", address, timeout_s=timeout_s, api_key=self.api_key)
        if not 200 <= status < 300 and status != 404:
            raise EngineError(f"got status {status} from the router for the removal of {worker.url}: {text[:500]}")


class ExistingRouter(RouterWorkers):
    """A router that runs already: it is neither started nor ended."""

    def __init__(self, host: str, port: int, *, api_key: str, worker_api_key: str | None) -> None:
        self.host, self.port, self.api_key, self._worker_api_key = host, port, api_key, worker_api_key

    @property
    def url(self) -> str:
        return http_url(self.host, self.port)

    @property
    def alive(self) -> bool:
        """True: whether it answers shows when it is asked."""
        return True
