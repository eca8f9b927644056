"""The routers of a run, one in front of each model's engines, kept alive: one that ends or hangs is started again.

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

from slime.core.errors import SlimeError
from slime.serving.plain_http import request
from slime.serving.router import Router

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
SILENCE_LIMIT_S = 8.0
"""How long a router may leave a question unanswered; it does nothing else than answering."""
START_LIMIT_S = 60.0
MAX_FAILURES = 3
STEADY_S = 60.0
"""After such a time the tries count from the beginning."""


class _Kept:
    """One router, what it is to know, and how often it had to be started again."""

    def __init__(self, router: Router) -> None:
        self.router, self.lock = router, threading.Lock()
        self.servers: dict[str, None] = {}
        self.failures, self.steady_since, self.restarts = 0, time.monotonic(), 0
        self.problem: SlimeError | None = None


class Routers:
    """By model. `close` at the end."""

    def __init__(self, make: Mapping[str, Callable[[], Router]]) -> None:
        """Starts them. `make`: makes the one of a model. Raises `EngineError` or `DeadlineExceeded`."""
        self._kept = {model: _Kept(made()) for model, made in make.items()}
        try:
            for kept in self._kept.values():
                kept.router.start()
            for kept in self._kept.values():
                kept.router.wait_ready(START_LIMIT_S)
        except BaseException:
            self._stop_all()
            raise
        for kept in self._kept.values():
            kept.router.keep_port()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="routers", daemon=True)
        self._thread.start()

    def __getitem__(self, model: str) -> Router:
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
                    kept.router.add_worker(url)

    def dismiss(self, model: str, urls: Iterable[str]) -> None:
        """The router sends nothing there any more. Ones that it does not have are not an error."""
        kept = self._kept[model]
        with kept.lock:
            for url in urls:
                kept.servers.pop(url, None)
                if kept.problem is None and kept.router.alive:
                    kept.router.remove_worker(url)

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
        self._stop_all()

    def _stop_all(self) -> None:
        for kept in self._kept.values():
            kept.router.stop()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            for model, kept in self._kept.items():
                if kept.problem is None and not self._closed.is_set() and (trouble := _trouble(kept.router)):
                    self._start_again(model, kept, trouble)

    def _start_again(self, model: str, kept: _Kept, trouble: str) -> None:
        if time.monotonic() - kept.steady_since > STEADY_S:
            kept.failures = 0
        kept.failures += 1
        logger.warning("the router of model %s %s; it is started again", model, trouble)
        with kept.lock:
            try:
                kept.router.stop()
                kept.router.start()
                kept.router.wait_ready(START_LIMIT_S)
                for url in kept.servers:
                    kept.router.add_worker(url)
            except SlimeError as error:
                logger.error("the router of model %s did not come back: %s", model, error)
                if kept.failures >= MAX_FAILURES:
                    kept.problem = error
                return
        kept.restarts, kept.steady_since = kept.restarts + 1, time.monotonic()
        logger.info("the router of model %s answers again, with %d servers", model, len(kept.servers))


def _trouble(router: Router) -> str | None:
    """What is wrong with a router, in words; None if it answers."""
    if not router.alive:
        return "has ended"
    status, _ = request("GET", f"{router.url}/liveness", timeout_s=SILENCE_LIMIT_S)
    return None if status == 200 else f"did not answer within {SILENCE_LIMIT_S:.0f} s"
