"""What becomes of a weight sync that failed: laws of the engines as the driver deals with them, without processes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster import engines as engines_module
from slime.cluster.engines import Engines
from slime.cluster.guarded_hosts import GuardedHosts
from slime.core.errors import DeadlineExceeded, SlimeError, WeightSyncError
from slime.fleet.engine import EXPECTS_ANSWERS, Engine
from slime.fleet.membership import Membership


class Port:  # of `EnginesOfRun` what is asked here
    """Three engines; one of them may hang, which shows where it is expected to answer."""

    def __init__(self) -> None:
        self.hangs: int | None = None
        self.members: Membership

    def engines(self) -> list[Engine]:
        return [Engine(i, (i,)) for i in range(3)]

    def troubles(self) -> dict[int, str]:
        shows = self.hangs is not None and self.members[self.hangs].state in EXPECTS_ANSWERS
        return {self.hangs: "silent"} if self.hangs is not None and shows else {}

    def has_host(self, index: int) -> bool:
        return True

    def nothing(self, *given: Any) -> Any:
        return None

    watch = start = started = dismiss = dismissed = nothing

    def newcomers(self) -> list[Any]:
        return []


class Rollout:
    """The rollout side, and the engines that bring it no tokens."""

    def __init__(self) -> None:
        self.silent: list[str] = []
        self.stalled = SimpleNamespace(remote=lambda within_s: [*self.silent, "of another run"])


class Fleet(Engines):
    """All answer; requests go nowhere."""

    def __init__(self) -> None:
        self.port = port = Port()
        args: Any = SimpleNamespace(
            use_fault_tolerance=True,
            engine_start_timeout_s=1.0,
            rollout_health_check_timeout=0.2,
            rollout_health_check_interval=0.1,
            request_timeout_s=600.0,
        )
        self.rollout = rollout = Rollout()
        own_guardian = SimpleNamespace(tend=lambda: None)
        super().__init__(args, port, rollout, "key", GuardedHosts(own_guardian))  # type: ignore[arg-type]
        self.port.members = self.members
        for i in range(3):
            self.up(i, f"http://{i}")

    def _admit(self) -> None:
        pass

    def states(self) -> str:
        return " ".join(engine.state.value for engine in self.members.engines)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr(engines_module, "NOTICE_S", 0.1)
    monkeypatch.setattr(engines_module, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(engines_module, "all_there", bool)
    monkeypatch.setattr(engines_module, "peek", lambda answer: answer)
    return Fleet()


def failure(*engines: int, kind: Callable[[str], SlimeError] = WeightSyncError) -> SlimeError:
    error = kind("differs")
    error.engines = tuple(f"http://{i}" for i in engines)
    return error


def test_engines_that_fail_a_weight_sync_alone_are_lost_and_the_others_get_it_again(fleet: Fleet) -> None:
    takers = fleet.begin_sync()
    assert fleet.failed_sync(takers, failure(1))
    assert fleet.states() == "syncing dead syncing" and "differs" in fleet.members[1].reason
    assert [engine.index for engine in fleet.begin_sync()] == [0, 2]


def test_a_failure_of_all_is_the_weights_own_and_nobody_is_replaced_for_it(fleet: Fleet) -> None:
    assert not fleet.failed_sync(fleet.begin_sync(), failure(0, 1, 2))
    assert fleet.states() == "tainted tainted tainted"
    assert not fleet.failed_sync(fleet.begin_sync(), failure())


def test_one_that_cannot_join_is_lost_while_the_others_serve(fleet: Fleet) -> None:
    fleet.end_sync(fleet.begin_sync()[:2], 1)
    assert fleet.failed_sync(fleet.begin_sync(fleet.joiners()), failure(2))
    assert fleet.states() == "ready ready dead"


def test_after_a_wait_that_ran_out_one_that_hangs_has_the_time_to_show_it(fleet: Fleet) -> None:
    """Law: who takes weights may be silent; after that wait it may not, so the watch can tell who hangs."""
    fleet.port.hangs = 2
    assert fleet.failed_sync(fleet.begin_sync(), failure(kind=DeadlineExceeded))
    assert fleet.states() == "tainted tainted dead"
    assert [engine.index for engine in fleet.begin_sync()] == [0, 1]


def test_an_engine_that_serves_and_brings_no_tokens_is_lost(fleet: Fleet) -> None:
    fleet.rollout.silent, takers = ["http://1"], fleet.begin_sync()
    for _ in range(4):
        fleet.tend()
    assert fleet.states() == "syncing syncing syncing", "nobody asks it while it takes weights"
    fleet.end_sync(takers, 1)
    fleet.tend()
    fleet.tend()
    assert fleet.states() == "ready ready ready", "what was seen before it got weights says nothing"
    fleet._ask_for_stalls_at = 0.0
    fleet.tend()
    fleet.tend()
    assert fleet.states() == "ready dead ready" and "--request-timeout-s" in fleet.members[1].reason
