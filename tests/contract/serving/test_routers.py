"""Law: a router that ends or hangs comes back on its own port with its servers; one that cannot, says so."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.cluster.rollout_actor import _routers
from slime.core.errors import EngineError
from slime.core.topology import DEFAULT_NAME
from slime.serving import router as kept_router
from slime.serving.child_process import read_stat
from slime.serving.leased_ports import lease_ports, request
from slime.serving.router import Router, Routers
from slime.serving.server import SGLangServer
from slime.settings.topology_yaml import topology_of
from tests.support.forwarding import LockedProxy, between
from tests.support.openness import WITHOUT_KEY
from tests.support.rollout import rollout_args

BACK_LIMIT_S = 120.0
GENERATE = {"input_ids": [2, 40, 41], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}


@pytest.fixture
def kept(engine_server: SGLangServer, tmp_path: Path) -> Iterator[Routers]:
    """The router of one model, in front of the session's server."""
    found = Routers({"policy": lambda: Router(log_path=tmp_path / "router.log")})
    try:
        found.admit("policy", [engine_server.url])
        assert found.settled(BACK_LIMIT_S)
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_router_serves_on_ipv6(host: str, tmp_path: Path) -> None:
    router = Router(host=host, log_path=tmp_path / "router.log")
    router.start()
    try:
        router.wait_ready()
        assert router.url == f"http://[::1]:{router.port}" and router.workers() == []
    finally:
        router.stop()


def test_a_router_that_refuses_its_own_run_ends_the_start(tmp_path: Path) -> None:
    router = Router(log_path=tmp_path / "router.log")
    router.start()
    router.api_key = "another"
    try:
        with pytest.raises(EngineError, match=r"rejects the run's key with status 401.*--router-"):
            router.wait_ready()
    finally:
        router.stop()


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
    if signum == signal.SIGSTOP:
        wait_until("the router to stop", lambda: is_stopped(victim))
    wait_until("another router", lambda: kept.restarts == 1)
    wait_until("its servers", lambda: answers(router, url))
    assert router.url == url and router.pid != victim and read_stat(victim) is None
    assert [worker.url for worker in router.workers()] == [engine_server.url]
    kept.require_alive()
    kept.dismiss("policy", [engine_server.url])
    assert kept.settled(BACK_LIMIT_S)
    assert router.workers() == []


def test_the_router_of_a_run_has_the_key_of_its_engines_and_its_settings(
    engine_server: SGLangServer, tmp_path: Path
) -> None:
    """Law: engines that ask for the key of the run are reached through its router, by those who have it alone; what the
    router itself asks them it asks with the key."""
    model = ("--hf-checkpoint", str(engine_server.model_path))
    args = rollout_args(tmp_path, *model, "--router-max-payload-size", "2000")
    locked = LockedProxy(engine_server.url, "the key of the run")
    with between(locked):
        started = _routers(args, topology_of(args), tmp_path, locked.key)
        try:
            started.admit(DEFAULT_NAME, [locked.url])
            assert started.settled(BACK_LIMIT_S)
            url = started.url(DEFAULT_NAME)
            for key, expected in ((None, 401), ("another", 401), (locked.key, 200)):
                status, text = request("POST", f"{url}/generate", GENERATE, timeout_s=60, api_key=key)
                assert status == expected, text
            long = {**GENERATE, "input_ids": [40] * 1000}
            assert request("POST", f"{url}/generate", long, timeout_s=60, api_key=locked.key)[0] == 413
            assert request("POST", f"{url}/flush_cache", timeout_s=60, api_key=locked.key)[0] == 200
            assert not locked.refused
            require_closed(url, str(engine_server.model_path))
        finally:
            started.close()


def require_closed(url: str, model: str) -> None:
    """Law: without a key a router answers what docs/multi_node.md says, and no more; of the two routes that are no
    health checks one says which model it is, the other one how many engines there are, and neither takes anything.
    """
    told: dict[str, str] = {}
    for path in ROUTES_OF_ROUTERS:
        for method in ("GET", "POST", "PUT", "DELETE"):
            status, text = request(method, f"{url}{path}", {} if method in ("POST", "PUT") else None, timeout_s=60)
            if status not in (401, 404, 405):
                assert method == "GET", f"{method} {path} without a key: {status} {text}"
                told[path] = text
    assert told.keys() == set(WITHOUT_KEY["sglang::router"]), told
    assert [one.get("id") for one in json.loads(told["/v1/models"])["data"]] == [model]
    for path in ("/get_server_info", "/readiness"):
        assert {type(value) for name, value in json.loads(told[path]).items() if name != "status"} <= {bool, int}, told


ROUTES_OF_ROUTERS = (
    *(
        "/liveness",
        "/readiness",
        "/health",
        "/health_generate",
        "/engine_metrics",
        "/get_server_info",
        "/get_model_info",
    ),
    *("/v1/models", "/generate", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/classify"),
    *("/v1/responses", "/v1/responses/a", "/v1/responses/a/cancel", "/v1/responses/a/input_items", "/v1/rerank"),
    *("/v1/conversations", "/v1/conversations/a", "/rerank", "/v1/tokenize", "/v1/detokenize", "/v1/tokenizers"),
    *("/v1/tokenizers/a", "/v1/tokenizers/a/status", "/flush_cache", "/get_loads", "/parse/function_call"),
    *("/parse/reasoning", "/wasm", "/wasm/a", "/workers", "/workers/a", "/ha/status", "/ha/health", "/ha/workers"),
    *(
        "/ha/workers/a",
        "/ha/policies",
        "/ha/policies/a",
        "/ha/config",
        "/ha/config/a",
        "/ha/rate-limit",
        "/ha/shutdown",
    ),
    *("/metrics", "/server_info", "/model_info", "/add_worker", "/remove_worker", "/list_workers", "/openapi.json"),
)
"""Those that the binary of 0.3.2 names, and older ones."""


def is_stopped(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state in "tT"


def answers(router: Router, url: str) -> bool:
    status, _ = request("POST", f"{url}/generate", GENERATE, timeout_s=60, api_key=router.api_key)
    return status == 200


@pytest.fixture
def dead_url() -> Iterator[str]:
    """An address at which nobody listens, or will."""
    with lease_ports() as free:
        yield f"http://127.0.0.1:{free.port}"


def test_a_dead_server_keeps_no_other_from_a_router_that_came_back(
    kept: Routers, engine_server: SGLangServer, dead_url: str
) -> None:
    kept.dismiss("policy", [engine_server.url])
    kept.admit("policy", [dead_url, engine_server.url])
    os.kill(kept["policy"].pid, signal.SIGKILL)
    wait_until("another router", lambda: kept.restarts == 1)
    wait_until("the live server", lambda: servers(kept) == [engine_server.url])
    assert not kept.settled(0.5), "the dead server is still to come"
    kept.dismiss("policy", [dead_url])
    assert kept.settled(BACK_LIMIT_S)
    assert servers(kept) == [engine_server.url]
    assert kept.restarts == 1 and kept.problem is None, "a dead server is not a failure of the router"


def servers(kept: Routers) -> list[str]:
    """Those that the router lists; none while it does not answer."""
    try:
        return [worker.url for worker in kept["policy"].workers() if worker.healthy]
    except EngineError:
        return []


@pytest.mark.slow
def test_an_admission_does_not_wait_for_a_router_that_hangs(
    kept: Routers, engine_server: SGLangServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_router, "SILENCE_LIMIT_S", 3.0)
    kept.dismiss("policy", [engine_server.url])
    assert kept.settled(BACK_LIMIT_S)
    victim = kept["policy"].pid
    os.kill(victim, signal.SIGSTOP)
    wait_until("the router to stop", lambda: is_stopped(victim))
    kept.admit("policy", [engine_server.url])
    assert is_stopped(victim) and kept.restarts == 0, "the admission waited for another router"
    assert kept.settled(BACK_LIMIT_S)
    assert kept.restarts == 1 and servers(kept) == [engine_server.url]


def test_the_last_word_about_a_server_counts(
    kept: Routers, engine_server: SGLangServer, dead_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_router, "ASK_AGAIN_S", 1.0)
    for _ in range(20):
        kept.dismiss("policy", [engine_server.url])
        kept.admit("policy", [engine_server.url, dead_url])
        kept.dismiss("policy", [dead_url])
    assert kept.settled(BACK_LIMIT_S)
    assert servers(kept) == [engine_server.url]
    for _ in range(20):
        kept.admit("policy", [engine_server.url])
        kept.dismiss("policy", [engine_server.url])
    assert kept.settled(BACK_LIMIT_S)
    assert servers(kept) == []


def test_a_router_that_cannot_come_back_is_an_error(kept: Routers, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []

    def refuses(router: Router) -> None:
        starts.append(router)
        raise EngineError("its port is taken")

    monkeypatch.setattr(kept_router, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(Router, "start", refuses)
    os.kill(kept["policy"].pid, signal.SIGKILL)
    wait_until("the watch to give up", lambda: kept.problem is not None)
    with pytest.raises(EngineError, match="its port is taken"):
        kept.require_alive()
    assert len(starts) == 3
