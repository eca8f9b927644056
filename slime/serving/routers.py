"""The routers of a run, one in front of each model's engines, kept alive: one that ends or hangs is started again.

A router that runs already (`ExistingRouter`) is used and not kept: while it does not answer the log says so, and when
it does again it gets the servers that it ought to have. At the end it has none of them.

Ours ask engines directly; routers are for others: user code, agents, people. A router that is started again listens on
its old port and gets the same servers, so who asks it sees a refused connection for about a second, and no other.

Consumes: servers to send to (`admit`, `dismiss`), from any thread. Produces: routers that know exactly these. Waits
for: routers to start and to answer, in the caller's thread or in its own, each with a limit. Is woken by: time, every
`LOOK_EVERY_S`.

Invariants
1. One change of a router at a time; what it is to know is written down before it is asked to.
2. A router that does not come back in `MAX_FAILURES` tries stays dead, and `require_alive` says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from slime.core.errors import EngineError, SlimeError
from slime.serving.plain_http import request
from slime.serving.router import Router
from slime.serving.router_workers import ExistingRouter

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
SILENCE_LIMIT_S = 8.0
"""How long a router may leave a question unanswered; it does nothing else than answering."""
START_LIMIT_S = 60.0
MAX_FAILURES = 3
STEADY_S = 60.0
"""After such a time the tries count from the beginning."""


AnyRouter = Router | ExistingRouter


class _Kept:
    """One router, what it is to know, and how often it had to be started again."""

    def __init__(self, router: AnyRouter) -> None:
        self.router, self.lock = router, threading.Lock()
        self.servers: dict[str, None] = {}
        self.failures, self.steady_since, self.restarts = 0, time.monotonic(), 0
        self.problem: SlimeError | None = None
        self.silent = False
        """Of one that runs already: whether the last question was in vain."""


class Routers:
    """By model. `close` at the end."""

    def __init__(self, make: Mapping[str, Callable[[], AnyRouter]]) -> None:
        """Starts those that do not run yet. `make`: makes the one of a model. Raises `EngineError` or
        `DeadlineExceeded`.
        """
        self._kept = {model: _Kept(made()) for model, made in make.items()}
        ours = [kept.router for kept in self._kept.values() if isinstance(kept.router, Router)]
        try:
            for kept in self._kept.values():
                if isinstance(kept.router, ExistingRouter):
                    _require_ready(kept.router)
            for router in ours:
                router.start()
            for router in ours:
                router.wait_ready(START_LIMIT_S)
        except BaseException:
            self._stop_all()
            raise
        for router in ours:
            router.keep_port()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="routers", daemon=True)
        self._thread.start()

    def __getitem__(self, model: str) -> AnyRouter:
        return self._kept[model].router

    @property
    def restarts(self) -> int:
        """How often any of them was started again."""
        return sum(kept.restarts for kept in self._kept.values())

    def admit(self, model: str, urls: Iterable[str]) -> None:
        """Lets a model's router send to these servers. Ones that it has stay. Raises what `Router.add_worker` does."""
        kept = self._kept[model]
        with kept.lock:
            for url in urls:
                kept.servers[url] = None
                if kept.problem is None and kept.router.alive:
                    _change(kept, kept.router.add_worker, url)

    def dismiss(self, model: str, urls: Iterable[str]) -> None:
        """The router sends nothing there any more. Ones that it does not have are not an error."""
        kept = self._kept[model]
        with kept.lock:
            for url in urls:
                kept.servers.pop(url, None)
                if kept.problem is None and kept.router.alive:
                    _change(kept, kept.router.remove_worker, url)

    @property
    def problem(self) -> SlimeError | None:
        """Why one of them has ended for good; None if none has."""
        return next((kept.problem for kept in self._kept.values() if kept.problem is not None), None)

    def require_alive(self) -> None:
        """Raises `EngineError` if one has ended for good."""
        if self.problem is not None:
            raise self.problem

    def close(self) -> None:
        """Ends all of them. May be called again."""
        self._closed.set()
        self._thread.join()
        for model, kept in self._kept.items():
            if isinstance(kept.router, ExistingRouter) and not kept.silent:
                self.dismiss(model, list(kept.servers))
        self._stop_all()

    def _stop_all(self) -> None:
        for kept in self._kept.values():
            if isinstance(kept.router, Router):
                kept.router.stop()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            for model, kept in self._kept.items():
                if kept.problem is not None or self._closed.is_set():
                    continue
                trouble = _trouble(kept.router)
                if isinstance(kept.router, ExistingRouter):
                    self._note(model, kept, trouble)
                elif trouble:
                    self._start_again(model, kept, kept.router, trouble)

    def _note(self, model: str, kept: _Kept, trouble: str | None) -> None:
        """What became of a router that is not ours."""
        at = f"the router of model {model} at {kept.router.url}"
        if trouble and not kept.silent:
            logger.warning("%s %s; requests of the run do without it", at, trouble)
        if kept.silent and not trouble:
            with kept.lock:
                for url in kept.servers:
                    _change(kept, kept.router.add_worker, url)
            logger.info("%s answers again", at)
        kept.silent = trouble is not None

    def _start_again(self, model: str, kept: _Kept, router: Router, trouble: str) -> None:
        if time.monotonic() - kept.steady_since > STEADY_S:
            kept.failures = 0
        kept.failures += 1
        logger.warning("the router of model %s %s; it is started again", model, trouble)
        with kept.lock:
            try:
                router.stop()
                router.start()
                router.wait_ready(START_LIMIT_S)
                for url in kept.servers:
                    router.add_worker(url)
            except SlimeError as error:
                logger.error("the router of model %s did not come back: %s", model, error)
                if kept.failures >= MAX_FAILURES:
                    kept.problem = error
                return
        kept.restarts, kept.steady_since = kept.restarts + 1, time.monotonic()
        logger.info("the router of model %s answers again, with %d servers", model, len(kept.servers))


def _change(kept: _Kept, change: Callable[[str], None], url: str) -> None:
    """Adds or removes a server. What a router that is not ours does not do is logged: nothing of the run needs it."""
    try:
        change(url)
    except SlimeError as error:
        if isinstance(kept.router, Router):
            raise
        logger.warning("the router at %s did not follow: %s", kept.router.url, error)


def _require_ready(router: ExistingRouter) -> None:
    """Raises `EngineError` if it does not answer, or turns the key down."""
    try:
        router.workers()
    except EngineError as error:
        raise EngineError(
            f"got --sglang-router-ip {router.host} --sglang-router-port {router.port}, where no router answers to the "
            f"key of --router-api-key: {error}; start it, or leave the flags out and the run starts its own"
        ) from error


def _trouble(router: AnyRouter) -> str | None:
    """What is wrong with a router, in words; None if it answers."""
    if not router.alive:
        return "has ended"
    status, _ = request("GET", f"{router.url}/liveness", timeout_s=SILENCE_LIMIT_S)
    return None if status == 200 else f"did not answer within {SILENCE_LIMIT_S:.0f} s"
