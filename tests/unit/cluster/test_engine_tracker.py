"""Who gets weights and requests, and what becomes of a weight sync that failed: laws of the engines as the driver deals
with them, without processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster import engine_tracker as engines_module
from slime.cluster.engine_tracker import Engines
from slime.cluster.hosts import GuardedHosts
from slime.core.errors import DeadlineExceeded, EngineError, SlimeError, WeightSyncError
from slime.core.topology import Worker
from slime.fleet.supervisor import EVALUATION, EXPECTS_ANSWERS, FROZEN, Engine, Membership, State


class Port:  # the part of `RayEngines` that is called here
    """Engines; one of them may hang, which shows where it is expected to answer."""

    def __init__(self, *engines: Engine) -> None:
        self._engines = engines
        self.hangs: int | None = None
        self.living: list[int] = []
        self.members: Membership
        self.dismissed: Callable[[Engine], None]

    def engines(self) -> list[Engine]:
        return list(self._engines)

    def troubles(self) -> dict[int, str]:
        shows = self.hangs is not None and self.members[self.hangs].state in EXPECTS_ANSWERS
        return {self.hangs: "silent"} if self.hangs is not None and shows else {}

    def has_host(self, index: int) -> bool:
        return True

    def nothing(self, *given: Any) -> Any:
        return None

    def heard(self, index: int) -> None:
        self.living.append(index)

    watch = start = started = stop = nothing

    def dismiss(self, engine: Engine) -> None:
        self.dismissed(engine)

    def newcomers(self) -> list[Any]:
        return []


class Rollout:
    """The rollout side: what it was told, and the engines that bring it no tokens."""

    def __init__(self) -> None:
        self.silent: list[str] = []
        self.bring: list[str] = []
        self.within_s: list[float] = []
        self.said: list[tuple[str, str]] = []
        self.answer: Any = None
        self.stalled = SimpleNamespace(remote=self._stalled)
        self.progressing = SimpleNamespace(remote=lambda within_s: self.bring)
        self.admit, self.dismiss = (SimpleNamespace(remote=partial(self._hear, what)) for what in ("admit", "dismiss"))

    def _stalled(self, within_s: float) -> list[str]:
        self.within_s.append(within_s)
        return [*self.silent, "of another run"]

    def _hear(self, what: str, model: str, urls: list[str], *rest: Any) -> Any:
        self.said += [(what, url) for url in urls]
        return self.answer


class Fleet(Engines):
    """All answer."""

    def __init__(self, *engines: Engine) -> None:
        self.port = port = Port(*engines)
        args: Any = SimpleNamespace(
            use_fault_tolerance=True,
            engine_start_timeout_s=1.0,
            rollout_health_check_timeout=0.2,
            rollout_health_check_interval=0.1,
            request_timeout_s=600.0,
            eval_fleet_must_work=False,
        )
        self.rollout = rollout = Rollout()
        self.files: Any = SimpleNamespace(begin=list, drained=set, write=lambda *said: None)
        own_guardian = SimpleNamespace(tend=lambda: None)
        super().__init__(args, port, rollout, "key", GuardedHosts(own_guardian), self.files)  # type: ignore[arg-type]
        self.port.members = self.members
        for engine in engines:
            self.up(engine.index, f"http://{engine.index}")

    def states(self) -> str:
        return " ".join(engine.state.value for engine in self.members.engines)


def told(answers: list[Any], **_: Any) -> list[Any]:
    """Answers of actors, or the error that is one."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> type[Fleet]:
    """Actors answer at once."""
    monkeypatch.setattr(engines_module, "NOTICE_S", 0.1)
    monkeypatch.setattr(engines_module, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(engines_module, "all_there", bool)
    monkeypatch.setattr(engines_module, "peek", lambda answer: answer)
    monkeypatch.setattr(engines_module.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(engines_module, "wait_for", told)
    return Fleet


@pytest.fixture
def fleet(make: type[Fleet]) -> Fleet:
    """Three engines of the policy."""
    return make(*(Engine(i, (i,)) for i in range(3)))


def failure(*engines: int, kind: Callable[[str], SlimeError] = WeightSyncError) -> SlimeError:
    error = kind("differs")
    error.engines = tuple(f"http://{i}" for i in engines)
    return error


def test_requests_go_to_engines_that_were_verified_and_to_no_other(fleet: Fleet) -> None:
    """Law: nor to one that came back at its old address, before it has weights; and each is told of once."""
    said = fleet.rollout.said
    fleet.tend()
    takers = fleet.begin_sync()
    fleet.tend()
    assert said == []
    fleet.end_sync(takers[:2], 1)
    fleet.tend()
    assert said == [("admit", "http://0"), ("admit", "http://1")] and fleet.states() == "ready ready syncing"
    said.clear()
    fleet._supervisor.lost(fleet.members[1], "gone")
    fleet.members.change(1, State.STARTING, incarnation=1)
    fleet.up(1, "http://1")
    fleet.tend()
    assert said == [("dismiss", "http://1")]
    fleet.end_sync(fleet.begin_sync(fleet.joiners()), 1)
    assert said[1:] == [("admit", "http://1"), ("admit", "http://2")]


def test_a_drained_engine_gets_no_requests_and_is_not_reported_as_dead(fleet: Fleet) -> None:
    """Law: an engine that is named by its number or its host leaves, and comes back once it is not named any more."""
    fleet.end_sync(fleet.begin_sync(), 1)
    reported: list[Any] = []
    fleet.rollout.said.clear()
    fleet.files.drained = lambda: {"1"}
    fleet.files.write = lambda engines, drained, refused: reported.append((set(drained), dict(refused)))
    fleet.rollout.dismiss = SimpleNamespace(remote=lambda model, urls, died: fleet.rollout.said.append((urls, died)))
    for _ in range(2):
        fleet._orders_at = 0.0
        fleet.tend()
    assert fleet.rollout.said == [(["http://1"], False)] and fleet.states() == "ready dead ready"
    assert reported == [({1}, {})] * 2
    fleet.files.drained = set
    fleet._orders_at = 0.0
    fleet.tend()
    assert fleet.states() == "ready starting ready" and reported[-1] == (set(), {})


def test_what_the_rollout_side_raises_at_an_admission_is_raised_at_the_next_look(fleet: Fleet) -> None:
    fleet.rollout.answer = EngineError("no router")
    fleet.end_sync(fleet.begin_sync(), 1)
    with pytest.raises(EngineError, match="no router"):
        fleet.tend()


def test_frozen_engines_take_no_weights_and_give_way_if_they_lend_their_memory(make: type[Fleet]) -> None:
    """Law: of a pair of the policy's both are needed for an answer, whoever serves beside."""
    judge, other = Engine(2, (2,), model="judge", role=FROZEN), Engine(3, (3,), model="b", role=FROZEN, lends=True)
    fleet = make(Engine(0, (0,), worker=Worker.PREFILL), Engine(1, (1,), worker=Worker.DECODE), judge, other)
    takers = fleet.begin_sync()
    assert [engine.index for engine in takers] == [0, 1] and not fleet.can_answer
    first, second = takers
    fleet.end_sync([first], 1)
    assert not fleet.can_answer
    fleet.end_sync([second], 1)
    assert fleet.can_answer
    fleet.rollout.said.clear()
    with fleet.frozen_aside():
        fleet.tend()
        assert fleet.rollout.said == [("dismiss", "http://3")] and fleet.joiners() == ()
    assert fleet.rollout.said[1:] == [("admit", "http://3")]


def test_engines_of_an_evaluation_fleet_get_weights_for_evaluations_and_no_others(make: type[Fleet]) -> None:
    """Law: neither a weight sync nor a join has to do with them, nor an evaluation with the others."""
    policy, first, second = Engine(0, (0,)), *(Engine(i, (i,), model="eval_fleet", role=EVALUATION) for i in (1, 2))
    fleet = make(policy, first, second)
    assert [engine.index for engine in fleet.joiners()] == [0]
    fleet.end_sync(fleet.begin_sync(), 1)
    assert fleet.states() == "ready syncing syncing" and fleet.can_answer and not fleet.evaluating(1)
    takers = fleet.begin_evaluation()
    assert [engine.index for engine in takers] == [1, 2]
    assert fleet.failed_sync(takers, failure(2)), "of the fleet, one is left"
    assert fleet.states() == "ready syncing dead"
    fleet.serve_evaluation(fleet.begin_evaluation(), 1)
    assert fleet.rollout.said == [("admit", "http://0"), ("admit", "http://1")]
    assert [engine.index for engine in fleet.evaluating(1)] == [1] and not fleet.evaluating(2)
    fleet.end_sync(fleet.begin_sync(), 2)
    assert [engine.version for engine in fleet.members.engines] == [2, 1, None]


def test_an_evaluation_that_waits_gets_the_engine_that_is_being_restarted(make: type[Fleet]) -> None:
    """Law: it waits for one that will return, and for none that was given up."""
    fleet = make(Engine(0, (0,)), Engine(1, (1,), model="eval_fleet", role=EVALUATION))
    lost = "it is gone"
    fleet._supervisor.lost(fleet.members[1], lost)
    fleet._supervisor._again_at[1] = 0.0
    assert not fleet.begin_evaluation() and fleet.states() == "syncing starting"
    looks = iter([None, None, "http://1"])
    fleet.port.started = lambda engine: next(looks)  # type: ignore[method-assign,assignment,misc]
    assert [engine.index for engine in fleet.begin_evaluation(waits=True)] == [1]
    fleet._supervisor._restarts, began = False, time.monotonic()
    fleet._supervisor.lost(fleet.members[1], lost)
    assert not fleet.begin_evaluation(waits=True) and time.monotonic() - began < 1.0


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
    assert fleet._silence_s == pytest.approx(0.2 + 0.1), "the limit of an answer, and the pause before the question"
    fleet.port.hangs = 2
    assert fleet.failed_sync(fleet.begin_sync(), failure(kind=DeadlineExceeded))
    assert fleet.states() == "tainted tainted dead"
    assert [engine.index for engine in fleet.begin_sync()] == [0, 1]


def test_a_busy_machine_makes_the_wait_for_a_loss_no_longer(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the process table shows at once what has ended; only silence is judged by the load."""
    monkeypatch.setattr("slime.core.liveness.load", lambda: 20.0)
    takers, began = fleet.begin_sync(), time.monotonic()
    assert not fleet.lost_any(takers) and time.monotonic() - began < 20 * engines_module.NOTICE_S


def test_an_engine_that_serves_and_brings_no_tokens_is_lost(fleet: Fleet) -> None:
    began = time.monotonic()
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
    assert max(fleet.rollout.within_s[1:]) <= time.monotonic() - began, "it is asked of what was seen since"


def test_an_engine_that_brings_somebody_tokens_lives(fleet: Fleet) -> None:
    """Law: tokens are a sign of life for its watch, and of two clients the one that gets some is believed."""
    fleet.end_sync(fleet.begin_sync(), 1)
    fleet.rollout.silent = fleet.rollout.bring = ["http://1"]
    fleet._ask_for_stalls_at = 0.0
    for _ in range(3):
        fleet.tend()
    assert fleet.states() == "ready ready ready" and fleet.port.living == [1]


def test_an_engine_of_somebody_else_that_fails_weight_syncs_is_left_alone_for_longer(make: type[Fleet]) -> None:
    """Law: each of its failures costs the others a weight sync, too."""
    fleet, noted = make(*(Engine(i, (), external=True) for i in range(2))), list[Any]()
    fleet._supervisor.lost = lambda *given, **limits: noted.append((given[0].index, limits))  # type: ignore[method-assign]
    assert fleet.failed_sync(fleet.begin_sync(), failure(1))
    assert noted == [(1, {"longest_s": engines_module.LONGEST_REFUSAL_S})]
