"""Real engines for tests: a stock SGLang server on the CPU, and the router in front of it.

The one place in which tests start engines, but for those whose subject is the life of a server. Quick tests share the
server of the session (`tests/contract/conftest.py`); a server of one's own is a matter of half a minute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.serving.router import Router
from slime.serving.server import ServerSpec, SGLangServer

READY_LIMIT_S = 600.0
"""A server is up within half a minute on an idle machine."""


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


@contextlib.contextmanager
def fronting(url: str, folder: Path, **settings: Any) -> Iterator[Router]:
    """A ready router with the server at `url` as its only worker, for the block: `.url`, `.workers()`."""
    front = Router(log_path=folder / "router.log", **settings)
    try:
        front.start()
        front.wait_ready()
        front.add_worker(url)
        yield front
    finally:
        front.stop()
