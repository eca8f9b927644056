"""sglang-router 0.3.2 in front of a run's servers. Each model has one router, managed by one thread.

The run's own requests go directly to the engines. Routers serve all other clients, such as user code and clients of
`slime serve`. A failing router never blocks or delays changes to the engines.

A `Router` is started by the run. If it exits or hangs, its `KeptRouter` restarts it on the same port with the same
servers, and connections fail for a few seconds. An `ExistingRouter` is neither started nor stopped by the run. If it
stops responding, the run logs a warning. The run registers its servers again once the router responds, and removes them
at the end.

Any thread can request changes (`Routers.admit`, `dismiss`). These calls return immediately, and the router's thread
applies the changes. The thread polls every `LOOK_EVERY_S` and wakes early on a change or `begin_to_close`. Every
request to a router has a timeout.

Invariants
1. A router always requires a key, except for health checks. Otherwise any user of the host could register a server and
   receive requests that contain the engines' key. By default, the router and the engines have the same key, because the
   router forwards the client's key to the engine. The key is passed in the environment and never logged.
2. The metrics port is leased, because two runs would collide on the default port, and bound to loopback.
3. A lock guards the list of wanted servers. It is never held during a request to a router, so `admit` and `dismiss` do
   not block. Changes are applied in call order.
4. Servers are added one by one, without waiting. A server that a later check finds missing is added again.
5. The run removes only servers that it added.
6. After `MAX_FAILURES` failed restarts in a row, for example because the router rejects the run's key, the router stays
   dead and `require_alive` raises its error.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError, DeadlineExceeded, EngineError, SlimeError
from slime.core.liveness import Silence
from slime.core.processes import http_url, in_brackets
from slime.core.topology import Worker, bootstrap_of
from slime.serving.child_process import ChildProcess, python_module
from slime.serving.launch import API_KEY_ENV, ROUTER_FLAG
from slime.serving.leased_ports import LeasedServer, PortLease, lease_port, lease_ports, request
from slime.serving.server import without_secrets

logger = logging.getLogger(__name__)


class KeyRefused(EngineError):
    """The router responds but rejects the run's key."""


@dataclass(frozen=True, slots=True)
class RouterWorker:
    id: str
    url: str
    healthy: bool


class RouterWorkers:
    """Access to a router's server list. The router applies changes asynchronously, some time after the request."""

    api_key: str
    """Bearer token for every request to the router."""
    _worker_api_key: str | None
    """The key with which the router authenticates to the servers."""

    @property
    def url(self) -> str:
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        raise NotImplementedError

    def workers(self) -> list[RouterWorker]:
        """Lists the router's servers. Raises `KeyRefused`, or `EngineError` if the router does not respond."""
        status, text = request("GET", f"{self.url}/workers", api_key=self.api_key)
        if status in (401, 403):
            raise KeyRefused(f"the router at {self.url} rejects the run's key with status {status}: {text[:500]}")
        if status != 200:
            raise EngineError(f"{self.url}/workers failed with status {status}: {text[:500]}")
        return [
            RouterWorker(id=str(w["id"]), url=str(w["url"]), healthy=bool(w["is_healthy"]))
            for w in json.loads(text)["workers"]
        ]

    def ask_to_add(self, url: str, timeout_s: float, kind: Worker) -> None:
        """Asks the router to add a server. The router adds it once the server responds.

        Raises `EngineError` if the router rejects the request or does not respond.
        """
        body: dict[str, Any] = {"url": url} | ({"api_key": self._worker_api_key} if self._worker_api_key else {})
        if kind is not Worker.REGULAR:
            body["worker_type"] = kind.value
        if kind is Worker.PREFILL:
            body["bootstrap_port"] = bootstrap_of(url)[1]
        status, text = request("POST", f"{self.url}/workers", body, timeout_s=timeout_s, api_key=self.api_key)
        if not 200 <= status < 300:
            raise EngineError(f"the router did not add server {url} (status {status}): {text[:500]}")

    def ask_to_remove(self, worker: RouterWorker, timeout_s: float) -> None:
        """Asks the router to remove a server. Raises `EngineError` if the router rejects this or does not respond."""
        address = f"{self.url}/workers/{urllib.parse.quote(worker.id, safe='')}"
        status, text = request("DELETE", address, timeout_s=timeout_s, api_key=self.api_key)
        if not 200 <= status < 300 and status != 404:
            raise EngineError(f"the router did not remove server {worker.url} (status {status}): {text[:500]}")


class ExistingRouter(RouterWorkers):
    def __init__(self, host: str, port: int, *, api_key: str, worker_api_key: str | None) -> None:
        self.host, self.port, self.api_key, self._worker_api_key = host, port, api_key, worker_api_key

    @property
    def url(self) -> str:
        return http_url(self.host, self.port)

    @property
    def alive(self) -> bool:
        return True  # unknown until the router responds


DEFAULTS: Mapping[str, Any] = {
    "worker_startup_check_interval": 1,
    "shutdown_grace_period_secs": 1,
    "health_check_interval_secs": 10,
    "log_level": "warn",
    # A retry would sample a request twice. The rollout client decides when to retry, and counts retries.
    "disable_retries": True,
    # A server that is paused for a weight sync is slow, not broken. The supervisor monitors its health.
    "disable_circuit_breaker": True,
}
_OWNED = frozenset({"host", "port", "prometheus_port", "prometheus_host", "worker_urls"})
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Maps a wildcard address to the address to connect to."""
NO_PROXIES = {
    name: None for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
}
"""Proxy variables to remove from the router's environment, because it connects only to the run's engines."""


class Router(LeasedServer, RouterWorkers):
    """A router process started by the run."""

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
        """`port`: None picks a free port. `extra_args`: router arguments by field name (`args.router`). The key is
        `api_key` from `extra_args` if set, else `worker_api_key` (the servers' key), else a random key. `pairs`:
        whether each request goes to both a prefill and a decode server.
        """
        clash = sorted(_OWNED & (extra_args or {}).keys())
        if clash:
            raise ConfigError(f"slime sets the router arguments {clash} itself; remove them")
        super().__init__(host=host, log_path=log_path)
        self._fixed_port = port
        self._metrics_lease: PortLease | None = None
        self._extra = dict(extra_args or {})
        self.api_key = self._extra.pop("api_key", None) or worker_api_key or secrets.token_hex(32)
        self._worker_api_key = worker_api_key
        self._pairs = pairs

    @property
    def url(self) -> str:
        """The address to connect to. Raises `EngineError` before `start`."""
        return http_url(_EVERYWHERE.get(self.host, self.host), self.port)

    def start(self) -> None:
        """Starts the router process and returns immediately. Raises `EngineError` if its fixed port is in use."""
        assert self._process is None, "start() was called twice; call stop() first"
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

    @property
    def metrics_address(self) -> str | None:
        """HOST:PORT of the router's own metrics, on loopback. None before `start`."""
        return None if self._metrics_lease is None else f"127.0.0.1:{self._metrics_lease.port}"

    def keep_port(self) -> None:
        """Makes restarts reuse the current port."""
        self._fixed_port = self.port

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Waits until the router answers.

        Raises `DeadlineExceeded`, or `EngineError` if the router dies (with the end of its log) or rejects the run's
        key.
        """
        process = self._process  # another thread may stop it in the meantime
        if process is None:
            raise EngineError("wait_ready() was called before start()")
        process.wait_until(
            lambda: request("GET", f"{self.url}/liveness", timeout_s=2)[0] == 200,
            what="it was ready",
            timeout_s=timeout_s,
        )
        try:
            self.workers()
        except KeyRefused as error:
            raise EngineError(
                f"{error}; remove the --router-* flags that set the router's keys and roles, except --router-api-key"
            ) from error
        except EngineError:
            pass  # `KeptRouter` retries

    def stop(self, timeout_s: float = 3.0) -> None:
        """Stops the router. Idempotent. Raises `EngineError` if it survives SIGKILL."""
        if self._process is not None:
            self._process.stop(timeout_s)
            self._process = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        if self._metrics_lease is not None:
            self._metrics_lease.release()
            self._metrics_lease = None


AnyRouter = Router | ExistingRouter

LOOK_EVERY_S = 1.0
LOOK_SOON_S = 0.2
"""Interval between checks until the router has the wanted servers."""
SILENCE_LIMIT_S, QUESTION_LIMIT_S = 7.5, 4.0
"""How long a router may be silent, and the timeout of one request. Short, because a router only forwards requests."""
CHANGE_LIMIT_S = 5.0
"""Timeout of a request to add or remove a server."""
ASK_AGAIN_S = 10.0
"""How long a server can be missing from the router's list before it is added again."""
START_LIMIT_S = 60.0
MAX_FAILURES = 3
"""Number of consecutive failed restarts after which a router stays dead."""
LEAVE_LIMIT_S = 10.0
"""How long to wait at the end for an existing router to remove the run's servers."""


class KeptRouter:
    """A running router and a thread that keeps it alive and updates its server list. `close` stops both."""

    def __init__(self, model: str, router: AnyRouter) -> None:
        self.router, self.url, self.restarts = router, router.url, 0
        self.problem: SlimeError | None = None
        """The last error; set only once the router will not be restarted again."""
        self._name = f"the router of model {model} at {router.url}"
        self._notes = threading.Condition()
        """Guards the fields from `_wanted` to `_closing` and is notified when any of them changes."""
        self._wanted: dict[str, Worker] = {}
        self._dismissed: set[str] = set()
        """Servers to remove. They can be wanted again, because a new engine may have started at the same address."""
        self._news, self._is_settled, self._closing = False, True, False
        self._asked: dict[str, float] = {}
        """Time of the last request to add each server; minus infinity if the router may have lost it."""
        self._missing: set[str] = set()
        """Servers that have already been logged as missing."""
        self._failures, self._silent = 0, False
        self._life = threading.Lock()
        """Held while the process starts or stops, so that `close` is never followed by a restart."""
        self._thread = threading.Thread(target=self._keep, name=f"router {model}", daemon=True)
        self._thread.start()

    def admit(self, urls: Iterable[str], kind: Worker = Worker.REGULAR) -> None:
        with self._notes:
            self._wanted.update(dict.fromkeys(urls, kind))
            self._wake()

    def dismiss(self, urls: Iterable[str]) -> None:
        with self._notes:
            for url in urls:
                self._wanted.pop(url, None)
                self._dismissed.add(url)
            self._wake()

    def settled(self, limit_s: float) -> bool:
        """Waits until the router has the wanted servers or can no longer get them. Returns False on timeout."""
        with self._notes:
            self._notes.wait_for(lambda: self._is_settled or not self._can_settle(), limit_s)
            return self._is_settled or not self._can_settle()

    def begin_to_close(self) -> None:
        """Prevents further restarts. Returns immediately."""
        with self._notes:
            self._closing = True
            self._notes.notify_all()

    def close(self) -> None:
        """Stops the thread, and the router if the run started it, which also aborts a request in flight."""
        self.begin_to_close()
        if isinstance(self.router, Router):
            with self._life:
                self.router.stop()
        self._thread.join(SILENCE_LIMIT_S + LEAVE_LIMIT_S)

    def _wake(self) -> None:
        self._news, self._is_settled = True, False
        self._notes.notify_all()

    def _can_settle(self) -> bool:
        return self.problem is None and not self._silent and not self._closing

    def _keep(self) -> None:
        while not self._closing and self.problem is None:
            try:
                self._look()
            except Exception as error:  # unexpected responses must not stop the thread
                if not self._closing:
                    logger.warning("%s could not be checked: %s", self._name, error, exc_info=True)
            with self._notes:
                pause_s = LOOK_EVERY_S if self._is_settled or self._silent else LOOK_SOON_S
                self._notes.wait_for(lambda: self._news or self._closing, pause_s)
                self._news = False
                self._notes.notify_all()
        if isinstance(self.router, ExistingRouter) and not self._silent:
            self._leave(self.router)

    def _look(self) -> None:
        trouble = _trouble(self.router)
        if isinstance(self.router, ExistingRouter):
            self._note(trouble)
        elif trouble:
            trouble = self._start_again(self.router, trouble)
        if trouble is None and not self._closing:
            self._follow()

    def _note(self, trouble: str | None) -> None:
        """Logs when an existing router stops responding and when it recovers."""
        if trouble and not self._silent:
            logger.warning("%s %s; the run's own requests are not affected", self._name, trouble)
        if self._silent and not trouble:
            self._forget_asking()
            logger.info("%s answers again", self._name)
        self._silent = trouble is not None

    def _start_again(self, router: Router, trouble: str) -> str | None:
        """Restarts the router. Returns None on success, else the problem."""
        logger.warning("%s %s; restarting it", self._name, trouble)
        try:
            with self._life:
                if self._closing:
                    return trouble
                router.stop()
                router.start()
            self._wait_ready(router)
        except SlimeError as error:
            if self._closing:
                return trouble
            self._failures += 1
            logger.error("could not restart %s: %s", self._name, error)
            if self._failures >= MAX_FAILURES:
                with self._notes:
                    self.problem = error
                    self._notes.notify_all()
            return str(error)
        self._forget_asking()
        self._failures, self.restarts = 0, self.restarts + 1
        logger.info("%s answers again", self._name)
        return None

    def _wait_ready(self, router: Router) -> None:
        """Polls at short intervals, because the run may end in the meantime."""
        silence = Silence()
        while True:
            try:
                return router.wait_ready(1.0)
            except DeadlineExceeded:
                if self._closing or silence.exceeds(START_LIMIT_S):
                    raise

    def _forget_asking(self) -> None:
        """Makes `_ask_for` re-add all servers immediately, because a restarted router may have lost them."""
        self._asked = dict.fromkeys(self._asked, float("-inf"))

    def _follow(self) -> None:
        """Adds and removes servers until the router's list matches the wanted servers."""
        try:
            listed = self.router.workers()
        except SlimeError as error:
            logger.warning("%s failed to list its servers: %s", self._name, error)
            return
        with self._notes:
            known = {worker.url for worker in listed}
            self._dismissed &= known
            wanted, dismissed = dict(self._wanted), set(self._dismissed)
            here = {worker.url for worker in listed if worker.healthy} - dismissed
            off = [w for w in listed if w.url in dismissed or (w.url in self._asked and w.url not in self._wanted)]
            self._is_settled = not off and here.issuperset(wanted)
            self._notes.notify_all()
        for worker in off:
            self._take_off(worker)
        self._missing &= wanted.keys() - known
        for url, kind in wanted.items():
            if url not in known:
                self._ask_for(url, kind)

    def _take_off(self, worker: RouterWorker) -> None:
        try:
            self.router.ask_to_remove(worker, CHANGE_LIMIT_S)
        except SlimeError as error:
            logger.warning("%s failed to remove a server: %s", self._name, error)

    def _ask_for(self, url: str, kind: Worker) -> None:
        asked, now = self._asked.get(url), time.monotonic()
        if asked is not None and now - asked < ASK_AGAIN_S:
            return
        if asked is not None and asked > float("-inf") and url not in self._missing:
            logger.warning("%s has not added %s within %.0f s; trying again", self._name, url, ASK_AGAIN_S)
            self._missing.add(url)
        self._asked[url] = now
        try:
            self.router.ask_to_add(url, CHANGE_LIMIT_S, kind)
        except SlimeError as error:
            logger.warning("%s failed to add a server: %s", self._name, error)

    def _leave(self, router: ExistingRouter) -> None:
        """Removes the run's servers from the router."""
        deadline = time.monotonic() + LEAVE_LIMIT_S
        try:
            while left := [worker for worker in router.workers() if worker.url in self._asked]:
                if time.monotonic() > deadline:
                    logger.warning("%s still has servers: %s", self._name, ", ".join(worker.url for worker in left))
                    return
                for worker in left:
                    self._take_off(worker)
                time.sleep(LOOK_SOON_S)
        except SlimeError as error:
            logger.warning("%s may still have servers of this run: %s", self._name, error)


def _trouble(router: AnyRouter) -> str | None:
    """Returns what is wrong with a router, or None if it responds."""
    if not router.alive:
        return "has exited"
    silence = Silence()
    while True:
        began = time.monotonic()
        status, text = request("GET", f"{router.url}/liveness", timeout_s=QUESTION_LIMIT_S)
        if status == 200:
            return None
        if status:
            return f"responds to /liveness with status {status}"
        if time.monotonic() - began < QUESTION_LIMIT_S:
            return f"does not respond ({text})"
        if silence.exceeds(SILENCE_LIMIT_S):
            return f"did not respond within {silence.lasts_s:.0f} s"


class Routers:
    """The routers of a run, by model. Call `close` when the run ends."""

    def __init__(self, make: Mapping[str, Callable[[], AnyRouter]]) -> None:
        """Starts the run's own routers and waits until they respond. Raises `EngineError` or `DeadlineExceeded`."""
        routers = {model: made() for model, made in make.items()}
        ours = [router for router in routers.values() if isinstance(router, Router)]
        try:
            for router in routers.values():
                if isinstance(router, ExistingRouter):
                    _require_ready(router)
            for router in ours:
                router.start()
            for router in ours:
                router.wait_ready(START_LIMIT_S)
        except BaseException:
            for router in ours:
                router.stop()
            raise
        for router in ours:
            router.keep_port()
        self._kept = {model: KeptRouter(model, router) for model, router in routers.items()}

    def __getitem__(self, model: str) -> AnyRouter:
        return self._kept[model].router

    def url(self, model: str) -> str:
        """Returns the router's address, which stays valid across restarts."""
        return self._kept[model].url

    @property
    def restarts(self) -> int:
        return sum(kept.restarts for kept in self._kept.values())

    def admit(self, model: str, urls: Iterable[str], kind: Worker = Worker.REGULAR) -> None:
        """Queues these servers to be added to the model's router."""
        self._kept[model].admit(urls, kind)

    def dismiss(self, model: str, urls: Iterable[str]) -> None:
        """Queues these servers to be removed from the model's router. Ignores unknown servers."""
        self._kept[model].dismiss(urls)

    def settled(self, limit_s: float) -> bool:
        """Waits until each router has exactly the wanted servers. Returns False on timeout.

        Does not wait for a permanently failed router or for an existing router that does not respond.
        """
        deadline = time.monotonic() + limit_s
        return all([kept.settled(max(0.0, deadline - time.monotonic())) for kept in self._kept.values()])

    def metrics_addresses(self) -> dict[str, str]:
        """Returns model -> HOST:PORT of the metrics of the run's own routers."""
        own = {model: kept.router for model, kept in self._kept.items() if isinstance(kept.router, Router)}
        return {model: address for model, router in own.items() if (address := router.metrics_address) is not None}

    @property
    def problem(self) -> SlimeError | None:
        """The error of a permanently failed router, if any."""
        return next((kept.problem for kept in self._kept.values() if kept.problem is not None), None)

    def require_alive(self) -> None:
        """Raises the error of a permanently failed router, if any."""
        if self.problem is not None:
            raise self.problem

    def close(self) -> None:
        """Stops the run's own routers and removes the run's servers from existing routers. Idempotent."""
        for kept in self._kept.values():
            kept.begin_to_close()
        for kept in self._kept.values():
            kept.close()


def _require_ready(router: ExistingRouter) -> None:
    """Raises `EngineError` if the router does not respond or rejects the key."""
    try:
        router.workers()
    except EngineError as error:
        raise EngineError(
            f"cannot use the router at --sglang-router-ip {router.host} --sglang-router-port {router.port} with "
            f"the key from --router-api-key: {error}; start a router there, or omit the flags to let the run start one"
        ) from error
