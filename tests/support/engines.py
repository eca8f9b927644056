"""Real engines for tests: a stock SGLang server on the CPU, and the router in front of it.

The one place in which tests start engines, but for those whose subject is the life of a server. Quick tests share the
server of the session (`tests/contract/conftest.py`); a server of one's own is a matter of half a minute.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.core.topology import PAIRED
from slime.core.topology import Worker as Kind
from slime.serving.router import Router
from slime.serving.router import RouterWorker as Worker
from slime.serving.server import DEFAULT, ServerSpec, SGLangServer, missing_here

READY_LIMIT_S = 600.0
"""A server is up within half a minute on an idle machine."""
WORKERS_LIMIT_S = 120.0
"""A router knows of a server within seconds."""


def spec_of(model: Path, **more: Any) -> ServerSpec:
    """A server of `model` in float32, so that rounding is no excuse; `more`: fields of `ServerSpec`."""
    return ServerSpec(**{"model_path": str(model), "dtype": "float32", **more})


@contextlib.contextmanager
def serving(spec: ServerSpec, folder: Path) -> Iterator[SGLangServer]:
    """A ready server for the block: `.url`, `.model_path`, `.pid`, `.alive`, `.log_tail()`. Its log is in `folder`."""
    server = SGLangServer(spec, log_path=folder / "engine.log")
    try:
        server.start()
        server.wait_ready(timeout_s=READY_LIMIT_S)
        yield server
    finally:
        server.stop()


NO_TRANSFER = missing_here(DEFAULT, "cpu")
needs_pairs = pytest.mark.skipif(NO_TRANSFER is not None, reason=f"no engines in pairs here: {NO_TRANSFER}")
"""For tests of engines that hand keys and values to each other."""


@contextlib.contextmanager
def serving_pair(model: Path, folder: Path, **more: Any) -> Iterator[tuple[SGLangServer, SGLangServer]]:
    """Two ready servers for the block: one reads prompts, the other one samples. Their logs are in `folder`."""
    servers = [
        SGLangServer(spec_of(model, worker=worker, **more), log_path=folder / f"{worker.value}.log")
        for worker in PAIRED
    ]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready(timeout_s=READY_LIMIT_S)
        yield servers[0], servers[1]
    finally:
        for server in servers:
            server.stop()


def kill(server: SGLangServer) -> None:
    """SIGKILL to everything of the server, as the end of its host."""
    signalled(server, signal.SIGKILL)


def signalled(server: SGLangServer, number: signal.Signals) -> None:
    """Sends a signal to everything of the server."""
    for pid in [server.pid, *descendants(server.pid)]:
        os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """Processes below `pid`."""
    out = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            out += [child, *descendants(child)]
    return out


@contextlib.contextmanager
def fronting(url: str, folder: Path, **settings: Any) -> Iterator[Router]:
    """A ready router with the server at `url` as its only worker, for the block: `.url`, `.workers()`."""
    front = Router(log_path=folder / "router.log", **settings)
    try:
        front.start()
        front.wait_ready()
        send_to(front, url)
        yield front
    finally:
        front.stop()


def send_to(router: Router, url: str, kind: Kind = Kind.REGULAR) -> None:
    """Has a router add a server, and waits until it lists it as healthy."""
    router.ask_to_add(url, WORKERS_LIMIT_S, kind)
    _listed(router, lambda workers: any(worker.url == url and worker.healthy for worker in workers))


def send_nothing(router: Router) -> None:
    """Takes all servers off a router, and waits until it lists none."""
    for worker in router.workers():
        router.ask_to_remove(worker, WORKERS_LIMIT_S)
    _listed(router, lambda workers: not workers)


def _listed(router: Router, done: Callable[[list[Worker]], bool]) -> None:
    deadline = time.monotonic() + WORKERS_LIMIT_S
    while not done(workers := router.workers()):
        assert time.monotonic() < deadline, workers
        time.sleep(0.1)
