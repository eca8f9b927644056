"""Laws of the start of a run: who computes digests is warmed, what is told is true, and whoever started is ended."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster.launch_run import HASTY_END_S, _used
from slime.cluster.start_actors import _warm_digests
from slime.cluster.training_run import Run
from slime.core.errors import EngineError
from slime.fleet.supervisor import FROZEN, POLICY, Engine, State


class Warmed:
    """An actor that notes that it was asked."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.warm_digests = SimpleNamespace(remote=lambda: asked.append(name))


def test_frozen_engines_compute_no_digests() -> None:
    asked: list[str] = []
    engines = [Engine(0, (0,)), Engine(1, (1,), model="judge", role=FROZEN), Engine(2, (2,), role=POLICY)]
    args: Any = SimpleNamespace(device="cuda")
    trainers = [Warmed("rank 0", asked), Warmed("rank 1", asked)]
    _warm_digests(args, engines, [Warmed(f"engine {i}", asked) for i in range(3)], trainers)
    assert asked == ["rank 0", "engine 0", "engine 2"], "rank 0 sends, and the policy's engines are sent to"
    asked.clear()
    _warm_digests(args, engines, [], trainers)
    assert asked == [], "engines that run already have no actors"


class Members:
    """Engines of a run, and what the rollout side says of routers. `__bool__`: whether there are any."""

    def __init__(self, *engines: Engine) -> None:
        self.members = SimpleNamespace(engines=engines)

    def __bool__(self) -> bool:
        return bool(self.members.engines)


def told(
    caplog: pytest.LogCaptureFixture, run_dir: Path, engines: list[Engine], *, token: bool = True, **args: Any
) -> str:
    routers = {"default": "http://10.0.0.9:8000", "judge": "http://127.0.0.1:8001"}
    run: Any = object.__new__(Run)
    run.args = SimpleNamespace(run_dir=str(run_dir), **args)
    answers = {"urls": routers, "ray_asks_for_token": token}
    run._actors = SimpleNamespace(engines=Members(*engines), on_rollout=lambda method, **_: answers[method])
    with caplog.at_level(logging.INFO):
        run.tell_addresses()
    return caplog.text


def test_addresses_are_told_as_they_are(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    engines = [Engine(0, (0,), url="http://127.0.0.1:1", state=State.SYNCING), Engine(1, (1,), state=State.DEAD)]
    text = told(caplog, tmp_path, engines, rollout_external_engine_addrs=())
    assert "engines are at http://127.0.0.1:1; requests need the key of the run" in text
    assert "None" not in text, "one that was lost meanwhile is nowhere"
    assert "http://10.0.0.9:8000 (default), http://127.0.0.1:8001 (judge)" in text, "a router may be on another host"


def test_a_cluster_that_asks_for_no_token_is_not_joined_without_a_word(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Law: whoever reaches such a cluster can run code in the run; one sentence says so, and what to do."""
    assert "RAY_AUTH_MODE" not in told(caplog, tmp_path, [])
    text = told(caplog, tmp_path, [], token=False, ray_address="10.0.0.1:6379")
    assert "the Ray cluster at 10.0.0.1:6379 requires no token" in text and "RAY_AUTH_MODE=token" in text


def test_engines_that_run_already_have_no_key_of_the_run(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    engines = [Engine(0, (), url="http://10.0.0.7:1", state=State.SYNCING, external=True)]
    text = told(caplog, tmp_path, engines, rollout_external_engine_addrs=("10.0.0.7:1",))
    assert "the key of the run" not in text


def test_whoever_was_started_is_ended_in_order_if_telling_fails(tmp_path: Path) -> None:
    ended: list[float] = []

    def fails() -> None:
        raise EngineError("the router has ended")

    run: Any = SimpleNamespace(
        args=SimpleNamespace(save_timeout_s=1.0),
        doctor=SimpleNamespace(tend=lambda for_what: None),
        hang=lambda: None,
        tell_addresses=fails,
        death=lambda seen_as: None,
        finish_save=lambda limit_s: None,
        close=lambda limit_s: ended.append(limit_s),
    )
    memory: Any = SimpleNamespace(was_killed_for_memory=lambda: False)
    with pytest.raises(EngineError, match="the router has ended"):
        list(_used(run, memory, SimpleNamespace(logs=tmp_path)))  # type: ignore[arg-type]
    assert ended == [HASTY_END_S]
