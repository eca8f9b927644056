"""Law: a router that ends or hangs comes back on its own port with its servers; one that cannot, says so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.core.errors import EngineError
from slime.serving import routers as routers_module
from slime.serving.plain_http import request
from slime.serving.proctree import read_stat
from slime.serving.router import Router
from slime.serving.routers import Routers
from slime.serving.server import SGLangServer

BACK_LIMIT_S = 120.0
GENERATE = {"input_ids": [2, 40, 41], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}


@pytest.fixture
def kept(engine_server: SGLangServer, tmp_path: Path) -> Iterator[Routers]:
    """The router of one model, in front of the session's server."""
    found = Routers({"policy": lambda: Router(log_path=tmp_path / "router.log")})
    try:
        found.admit("policy", [engine_server.url])
        yield found
    finally:
        found.close()


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BACK_LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {BACK_LIMIT_S:.0f} s for {what}"
        time.sleep(0.1)


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_router_comes_back_with_its_servers(
    kept: Routers, engine_server: SGLangServer, signum: signal.Signals
) -> None:
    router = kept["policy"]
    url, victim = router.url, router.pid
    os.kill(victim, signum)
    stat = read_stat(victim)
    assert stat is None or stat.state in "ZXtT" or signum == signal.SIGKILL, "NOT PROVEN: the router goes on"
    wait_until("another router", lambda: kept.restarts == 1)
    wait_until("its servers", lambda: answers(router, url))
    assert router.url == url and router.pid != victim and read_stat(victim) is None
    assert [worker.url for worker in router.workers()] == [engine_server.url]
    kept.require_alive()
    kept.dismiss("policy", [engine_server.url])
    assert router.workers() == []


def answers(router: Router, url: str) -> bool:
    status, _ = request("POST", f"{url}/generate", GENERATE, timeout_s=60, api_key=router.api_key)
    return status == 200


def test_a_router_that_cannot_come_back_is_an_error(kept: Routers, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(router: Router) -> None:
        raise EngineError("its port is taken")

    monkeypatch.setattr(routers_module, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(Router, "start", refuses)
    os.kill(kept["policy"].pid, signal.SIGKILL)
    wait_until("the watch to give up", lambda: kept.problem is not None)
    with pytest.raises(EngineError, match="its port is taken"):
        kept.require_alive()
