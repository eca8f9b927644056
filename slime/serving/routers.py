"""The routers of a run, one in front of each model's engines, each looked after by a thread of its own (`KeptRouter`).

Ours ask engines directly; routers are for others: user code, agents, people. What befalls a router never stops or
delays a change of the engines.

Consumes: servers to send to (`admit`, `dismiss`), from any thread. Produces: routers that send to these. Waits for:
routers at the start and at the end, and for `settled`, each with a limit. Is woken by nothing.

Invariants
1. `admit` and `dismiss` write down what a router is to know and return at once, in the order in which they are called.
2. A router that does not come back in `MAX_FAILURES` tries stays dead, and `require_alive` says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from slime.core.errors import EngineError, SlimeError
from slime.core.topology import Worker
from slime.serving.kept_router import START_LIMIT_S, AnyRouter, KeptRouter
from slime.serving.router import Router
from slime.serving.router_workers import ExistingRouter


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
