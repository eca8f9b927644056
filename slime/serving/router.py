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
from slime.core.processes import http_url, in_brackets
from slime.core.silence import Silence
from slime.core.topology import Worker, bootstrap_of
from slime.core.topology import Worker as Kind
from slime.serving.child_process import ChildProcess, python_module
from slime.serving.launch import API_KEY_ENV, ROUTER_FLAG
from slime.serving.leased_ports import LeasedServer, lease_port, lease_ports, request
from slime.serving.server import without_secrets

# The servers of a router, over sglang-router 0.3.2's own routes: `Router` is one that the run starts, `ExistingRouter`
# one that runs already. It does what it is asked in its own time: `workers` says what it has.


@dataclass(frozen=True, slots=True)
class RouterWorker:
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

    def workers(self) -> list[RouterWorker]:
        """The servers that the router knows. Raises `EngineError` if it does not answer."""
        status, text = request("GET", f"{self.url}/workers", api_key=self.api_key)
        if status != 200:
            raise EngineError(f"got status {status} from {self.url}/workers: {text[:500]}")
        return [
            RouterWorker(id=str(w["id"]), url=str(w["url"]), healthy=bool(w["is_healthy"]))
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

    def ask_to_remove(self, worker: RouterWorker, timeout_s: float) -> None:
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


# `KeptRouter`: one router that is to know certain servers, and the thread that sees to it.
#
# A router of ours that ends or hangs is started again on its port and gets the same servers, so who asks it sees a
# refused connection for a few seconds. One that runs already (`ExistingRouter`) is used and not kept: while it does not
# answer the log says so, and when it does again it gets the servers that it ought to have. At the end it has none.
#
# Consumes: servers to send to, from any thread. Produces: a router that sends to these. Waits for: the router, in its
# own thread, each time with a limit. Is woken by: `admit`, `dismiss`, `begin_to_close`, and time.
#
# Invariants
# 1. What it is to know is a note under a lock that nobody keeps while a router is asked: notes never wait.
# 2. Servers are asked for one by one, and none is waited for: what is missing at the next look is asked for again
#    later.
# 3. Only servers that were admitted here are ever taken off.

logger = logging.getLogger(__name__)

AnyRouter = Router | ExistingRouter

LOOK_EVERY_S = 1.0
LOOK_SOON_S = 0.2
"""While the router does not know yet what it is to know."""
SILENCE_LIMIT_S, QUESTION_LIMIT_S = 7.5, 4.0
"""How long a router may leave questions unanswered, and one of them; it does nothing else than answering."""
CHANGE_LIMIT_S = 5.0
"""For its word that it will add or remove a server."""
ASK_AGAIN_S = 10.0
"""How long a server may be missing from the list before the router is asked for it again."""
START_LIMIT_S = 60.0
MAX_FAILURES = 3
"""After so many starts in a row that failed it is given up."""
LEAVE_LIMIT_S = 10.0
"""How long the end waits until a router that is not ours has forgotten the servers."""


class KeptRouter:
    """One of a run's routers, which runs when this is made. `begin_to_close`, then `close`, at the end."""

    def __init__(self, model: str, router: AnyRouter) -> None:
        self.router, self.url, self.restarts = router, router.url, 0
        self.problem: SlimeError | None = None
        """Why it has ended for good."""
        self._name = f"the router of model {model} at {router.url}"
        self._notes = threading.Condition()
        """Guards the next five; is notified when one of them changes."""
        self._wanted: dict[str, Kind] = {}
        """Server -> what it does of a request."""
        self._dismissed: set[str] = set()
        """Those to take off, even if they are wanted again: another engine may have come up at that address."""
        self._news, self._is_settled, self._closing = False, True, False
        self._asked: dict[str, float] = {}
        """Server -> when the router was asked to add it; a minus infinity is a router that has forgotten."""
        self._missing: set[str] = set()
        """Those of which the log has said that they are missing."""
        self._failures, self._silent = 0, False
        self._life = threading.Lock()
        """Of the process: nobody starts it while it is ended for good."""
        self._thread = threading.Thread(target=self._keep, name=f"router {model}", daemon=True)
        self._thread.start()

    def admit(self, urls: Iterable[str], kind: Kind = Kind.REGULAR) -> None:
        """It is to send to these, too."""
        with self._notes:
            self._wanted.update(dict.fromkeys(urls, kind))
            self._wake()

    def dismiss(self, urls: Iterable[str]) -> None:
        """It is to send nothing to these."""
        with self._notes:
            for url in urls:
                self._wanted.pop(url, None)
                self._dismissed.add(url)
            self._wake()

    def settled(self, limit_s: float) -> bool:
        """Waits until it sends where it is to. False if it does not within the limit and could."""
        with self._notes:
            self._notes.wait_for(lambda: self._is_settled or not self._can_settle(), limit_s)
            return self._is_settled or not self._can_settle()

    def begin_to_close(self) -> None:
        """Nothing is started any more. Returns at once."""
        with self._notes:
            self._closing = True
            self._notes.notify_all()

    def close(self) -> None:
        """Ends it if it is ours. The thread's last question ends with the router."""
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
            except Exception as error:  # a router may answer anything, and stays watched
                if not self._closing:
                    logger.warning("%s could not be looked after: %s", self._name, error, exc_info=True)
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
        """What became of a router that is not ours."""
        if trouble and not self._silent:
            logger.warning("%s %s; requests of the run do without it", self._name, trouble)
        if self._silent and not trouble:
            self._forget_asking()
            logger.info("%s answers again", self._name)
        self._silent = trouble is not None

    def _start_again(self, router: Router, trouble: str) -> str | None:
        """What is wrong afterwards; None if it answers again."""
        logger.warning("%s %s; it is started again", self._name, trouble)
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
            logger.error("%s did not come back: %s", self._name, error)
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
        """In short waits, because the run may end meanwhile."""
        silence = Silence()
        while True:
            try:
                return router.wait_ready(1.0)
            except DeadlineExceeded:
                if self._closing or silence.exceeds(START_LIMIT_S):
                    raise

    def _forget_asking(self) -> None:
        """The router may know nothing of what it was asked to do."""
        self._asked = dict.fromkeys(self._asked, float("-inf"))

    def _follow(self) -> None:
        """Asks the router for what differs between its servers and those that it is to have."""
        try:
            listed = self.router.workers()
        except SlimeError as error:
            logger.warning("%s does not list its servers: %s", self._name, error)
            return
        with self._notes:
            known = {worker.url for worker in listed}
            self._dismissed &= known  # the others are off already
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
            logger.warning("%s did not follow: %s", self._name, error)

    def _ask_for(self, url: str, kind: Kind) -> None:
        """Not too often: it may be on its way."""
        asked, now = self._asked.get(url), time.monotonic()
        if asked is not None and now - asked < ASK_AGAIN_S:
            return
        if asked is not None and asked > float("-inf") and url not in self._missing:
            logger.warning("%s has not taken %s in %.0f s; it is asked again", self._name, url, ASK_AGAIN_S)
            self._missing.add(url)
        self._asked[url] = now
        try:
            self.router.ask_to_add(url, CHANGE_LIMIT_S, kind)
        except SlimeError as error:
            logger.warning("%s did not follow: %s", self._name, error)

    def _leave(self, router: ExistingRouter) -> None:
        """None of the servers that were admitted here stays in a router that goes on."""
        deadline = time.monotonic() + LEAVE_LIMIT_S
        try:
            while left := [worker for worker in router.workers() if worker.url in self._asked]:
                if time.monotonic() > deadline:
                    logger.warning("%s still has %s", self._name, ", ".join(worker.url for worker in left))
                    return
                for worker in left:
                    self._take_off(worker)
                time.sleep(LOOK_SOON_S)
        except SlimeError as error:
            logger.warning("%s was not left without the servers: %s", self._name, error)


def _trouble(router: AnyRouter) -> str | None:
    """What is wrong with a router, in words; None if it answers."""
    if not router.alive:
        return "has ended"
    silence = Silence()
    while True:
        began = time.monotonic()
        status, text = request("GET", f"{router.url}/liveness", timeout_s=QUESTION_LIMIT_S)
        if status == 200:
            return None
        if status:
            return f"answers with status {status} when it is asked whether it lives"
        if time.monotonic() - began < QUESTION_LIMIT_S:
            return f"does not answer ({text})"
        if silence.exceeds(SILENCE_LIMIT_S):
            return f"did not answer within {silence.lasts_s:.0f} s"


# The routers of a run, one in front of each model's engines, each looked after by a thread of its own (`KeptRouter`).
#
# Ours ask engines directly; routers are for others: user code, agents, people. What befalls a router never stops or
# delays a change of the engines.
#
# Consumes: servers to send to (`admit`, `dismiss`), from any thread. Produces: routers that send to these. Waits for:
# routers at the start and at the end, and for `settled`, each with a limit. Is woken by nothing.
#
# Invariants
# 1. `admit` and `dismiss` write down what a router is to know and return at once, in the order in which they are
#    called.
# 2. A router that does not come back in `MAX_FAILURES` tries stays dead, and `require_alive` says so.


class Routers:
    """By model. `close` at the end."""

    def __init__(self, make: Mapping[str, Callable[[], AnyRouter]]) -> None:
        """Starts those that do not run yet. `make`: makes the one of a model. Raises `EngineError` or
        `DeadlineExceeded`.
        """
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
        """Where a model's router listens, also while it is started again."""
        return self._kept[model].url

    @property
    def restarts(self) -> int:
        """How often any of them was started again."""
        return sum(kept.restarts for kept in self._kept.values())

    def admit(self, model: str, urls: Iterable[str], kind: Worker = Worker.REGULAR) -> None:
        """A model's router is to send to these servers, and does soon. Ones that it has stay."""
        self._kept[model].admit(urls, kind)

    def dismiss(self, model: str, urls: Iterable[str]) -> None:
        """The router is to send nothing there any more. Ones that it does not have are not an error."""
        self._kept[model].dismiss(urls)

    def settled(self, limit_s: float) -> bool:
        """Waits until each router sends where it is to, and nowhere else. False if one does not within the limit.

        One that has ended for good, or that is not ours and does not answer, is not waited for.
        """
        deadline = time.monotonic() + limit_s
        return all([kept.settled(max(0.0, deadline - time.monotonic())) for kept in self._kept.values()])

    @property
    def problem(self) -> SlimeError | None:
        """Why one of them has ended for good; None if none has."""
        return next((kept.problem for kept in self._kept.values() if kept.problem is not None), None)

    def require_alive(self) -> None:
        """Raises `EngineError` if one has ended for good."""
        if self.problem is not None:
            raise self.problem

    def close(self) -> None:
        """Ends ours; one that is not ours has none of the servers afterwards. May be called again."""
        for kept in self._kept.values():
            kept.begin_to_close()
        for kept in self._kept.values():
            kept.close()


def _require_ready(router: ExistingRouter) -> None:
    """Raises `EngineError` if it does not answer, or turns the key down."""
    try:
        router.workers()
    except EngineError as error:
        raise EngineError(
            f"got --sglang-router-ip {router.host} --sglang-router-port {router.port}, where no router answers to the "
            f"key of --router-api-key: {error}; start it, or leave the flags out and the run starts its own"
        ) from error
