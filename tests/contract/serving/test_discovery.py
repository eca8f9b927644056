"""Laws of what a real server says of itself, and of a router that the run did not start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.core.errors import EngineError
from slime.core.hf_config import read_hf_config
from slime.core.text import NO_KEYS
from slime.core.topology import ONE_RANK
from slime.fleet.fitting import Wanted, layout_of_server, misfits
from slime.models import table_for
from slime.serving.leased_ports import request
from slime.serving.router import ExistingRouter, Router, Routers
from slime.serving.server import SGLangServer
from slime.serving.watch import NotAnswering, facts_of_server
from tests.support.engines import fronting, send_nothing

LIMIT_S = 120.0
KEY = "a key"


def wanted_of(model: Path, **settings: object) -> Wanted:
    config = read_hf_config(str(model))
    return Wanted(config, table_for(config), {"dtype": "float32", **settings}, labels=True, experts=False, trains=True)


def test_a_real_server_fits_the_run_that_would_have_started_it(
    engine_server: SGLangServer, tiny_model_path: Path
) -> None:
    facts = facts_of_server(engine_server.url, NO_KEYS, LIMIT_S, LIMIT_S, experts=False)
    assert misfits(facts, wanted_of(tiny_model_path)) == []
    assert (layout_of_server(facts), facts.asks_for_key) == (ONE_RANK, False)
    assert "api_key" not in facts.info


def test_a_real_server_of_another_model_is_refused(
    engine_server: SGLangServer, tiny_model_path: Path, tiny_llama: Path
) -> None:
    facts = facts_of_server(engine_server.url, NO_KEYS, LIMIT_S, LIMIT_S, experts=True)
    assert any("Qwen3ForCausalLM" in problem for problem in misfits(facts, wanted_of(tiny_llama)))
    (problem,) = misfits(facts, wanted_of(tiny_model_path, chunked_prefill_size=-1))
    assert "--chunked-prefill-size" in problem
    assert facts.probe is not None and facts.probe.labels and not facts.probe.experts and not facts.probe.repeats


def test_a_paused_server_goes_on_when_it_is_asked(engine_server: SGLangServer) -> None:
    assert request("POST", f"{engine_server.url}/pause_generation", {"mode": "abort"})[0] == 200
    facts = facts_of_server(engine_server.url, NO_KEYS, LIMIT_S, LIMIT_S, experts=False)
    assert facts.probe is not None, facts.problem


def test_nobody_is_not_a_server(tmp_path: Path) -> None:
    with pytest.raises(NotAnswering, match="does not respond"):
        facts_of_server("http://127.0.0.1:9", NO_KEYS, LIMIT_S, LIMIT_S, experts=False)


@pytest.fixture
def theirs(engine_server: SGLangServer, tmp_path: Path) -> Iterator[Router]:
    """A router that somebody else started, with a key, before its first server is taken off it."""
    with fronting(engine_server.url, tmp_path, extra_args={"api_key": KEY}) as router:
        send_nothing(router)
        yield router


def existing(router: Router, key: str = KEY) -> ExistingRouter:
    return ExistingRouter(router.host, router.port, api_key=key, worker_api_key=None)


def test_a_router_that_runs_already_gets_the_engines_and_is_left_without_them(
    theirs: Router, engine_server: SGLangServer
) -> None:
    routers = Routers({"default": lambda: existing(theirs)})
    routers.admit("default", [engine_server.url])
    assert routers.settled(LIMIT_S)
    assert [w.url for w in theirs.workers()] == [engine_server.url]
    routers.close()
    assert theirs.workers() == [] and theirs.alive


def test_its_end_is_survived_and_its_return_brings_the_engines_back(
    theirs: Router, engine_server: SGLangServer, caplog: pytest.LogCaptureFixture
) -> None:
    theirs.keep_port()
    routers = Routers({"default": lambda: existing(theirs)})
    theirs.stop()
    until(lambda: "the run's own requests are not affected" in caplog.text)
    routers.admit("default", [engine_server.url])
    routers.require_alive()
    theirs.start()
    theirs.wait_ready()
    until(lambda: [w.url for w in theirs.workers()] == [engine_server.url])
    routers.close()


def test_a_router_that_turns_the_key_down_is_named(theirs: Router) -> None:
    with pytest.raises(EngineError, match=r"--sglang-router-ip 127.0.0.1 .* key from --router-api-key"):
        Routers({"default": lambda: existing(theirs, "another")})


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
