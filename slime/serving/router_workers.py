"""The servers of a router, over sglang-router 0.3.2's own routes: `Router` is one that the run starts, `ExistingRouter`
one that runs already.

Invariants
1. `add_worker` returns only when the router itself lists the server as healthy, `remove_worker` only when it is gone.
"""

from __future__ import annotations

import json
import time
import urllib.parse
from dataclasses import dataclass
from typing import Any

from slime.core.errors import DeadlineExceeded, EngineError
from slime.serving.plain_http import request

_POLL_S = 0.1


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

    def add_worker(self, url: str, timeout_s: float = 60.0) -> None:
        """Adds a server and waits until the router lists it as healthy.

        Raises `EngineError` if the router refuses, `DeadlineExceeded` if it does not register the server in time.
        """
        if any(w.url == url and w.healthy for w in self.workers()):
            return
        self.ask_to_add(url, timeout_s)
        self._wait(lambda ws: any(w.url == url and w.healthy for w in ws), f"the router to register {url}", timeout_s)

    def ask_to_add(self, url: str, timeout_s: float) -> None:
        """Has the router add a server as soon as that answers. Raises `EngineError` if it refuses, or is silent."""
        body = {"url": url} | ({"api_key": self._worker_api_key} if self._worker_api_key else {})
        status, text = request("POST", f"{self.url}/workers", body, timeout_s=timeout_s, api_key=self.api_key)
        if not 200 <= status < 300:
            raise EngineError(f"got status {status} from the router for the new server {url}: {text[:500]}")

    def remove_worker(self, url: str, timeout_s: float = 60.0) -> None:
        """Removes a server and waits until it is gone; one that is not there is not an error.

        Raises `EngineError` if the router refuses, `DeadlineExceeded` if the server stays.
        """
        for worker in self.workers():
            if worker.url == url:
                self.ask_to_remove(worker, timeout_s)
        self._wait(lambda ws: all(w.url != url for w in ws), f"the router to forget {url}", timeout_s)

    def ask_to_remove(self, worker: Worker, timeout_s: float) -> None:
        """Has the router remove a server. Raises `EngineError` if it refuses, or is silent."""
        address = f"{self.url}/workers/{urllib.parse.quote(worker.id, safe='')}"
        status, text = request("DELETE", address, timeout_s=timeout_s, api_key=self.api_key)
        if not 200 <= status < 300 and status != 404:
            raise EngineError(f"got status {status} from the router for the removal of {worker.url}: {text[:500]}")

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


class ExistingRouter(RouterWorkers):
    """A router that runs already: it is neither started nor ended."""

    def __init__(self, host: str, port: int, *, api_key: str, worker_api_key: str | None) -> None:
        self.host, self.port, self.api_key, self._worker_api_key = host, port, api_key, worker_api_key

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """True: whether it answers shows when it is asked."""
        return True
