"""Laws of evaluations in the background: their order, the step they are logged under, and what a failure costs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster import training_run
from slime.cluster.training_run import FAILED_EVALUATIONS, EvalFleet
from slime.core.errors import ActorDied, DataError, EngineError, SlimeError, WeightSyncError
from slime.rollout.types import StepNews


class Answer:
    """An evaluation under way, which ends when a test says so."""

    def __init__(self) -> None:
        self.result: StepNews | SlimeError | None = None


class Bench:
    """A fleet over doubles. `log` holds what happened, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, must_work: bool = False) -> None:
        self.log: list[str] = []
        self.version = 1
        self.refuses: SlimeError | None = None
        self.serving, self.restarts = True, False
        self.running: list[Answer] = []
        self.on_wait: Callable[[Answer], None] = lambda answer: None
        self.logged: list[tuple[int, dict[str, float]]] = []
        engines = SimpleNamespace(evaluating=lambda version: ("engine",) if self.serving else ())
        evaluate, abandon = SimpleNamespace(remote=self._evaluate), SimpleNamespace(remote=self._abandon)
        actors: Any = SimpleNamespace(
            engines=engines, rollout=SimpleNamespace(evaluate=evaluate, abandon_evaluation=abandon)
        )
        args: Any = SimpleNamespace(eval_fleet_must_work=must_work, rollout_global_timeout_s=None)
        monkeypatch.setattr(training_run, "all_there", lambda answers: answers[0].result is not None)
        monkeypatch.setattr(training_run, "wait_for", self._wait)
        sync: Any = SimpleNamespace(send_for_evaluation=self._send)
        self.fleet = EvalFleet(
            args,
            actors,
            sync,
            watching=lambda what: nullcontext(lambda: "none"),
            log=lambda step, news, more: self.logged.append((step, {**news.metrics, **more})),
        )

    def _send(self, *, waits: bool) -> int | None:
        self.log.append(f"send {self.version}")
        self.serving = self.serving or (waits and self.restarts)
        if self.refuses is not None:
            raise self.refuses
        return self.version if self.serving else None

    def _evaluate(self, rollout_id: int) -> Answer:
        self.log.append(f"begin {rollout_id}")
        self.running.append(Answer())
        return self.running[-1]

    def _abandon(self) -> None:
        self.log.append("abandon")
        self.running[-1].result = EngineError("cancelled")

    def _wait(self, answers: list[Answer], *, on_poll: Callable[[], str], **limits: Any) -> list[StepNews]:
        (answer,) = answers
        assert limits["for_what"] and limits["limit_s"] > 0
        while answer.result is None:
            self.log.append("wait")
            on_poll()
            self.on_wait(answer)
        if isinstance(answer.result, SlimeError):
            raise answer.result
        return [answer.result]


def news(version: float, score: float = 0.5) -> StepNews:
    return StepNews({"eval/held": score, "eval/weight_version": version}, [])


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_an_evaluation_is_logged_under_its_step_when_it_has_ended_and_not_waited_for(bench: Bench) -> None:
    bench.fleet.begin(-1)
    for _ in range(3):
        bench.fleet.poll()
    assert bench.log == ["send 1", "begin -1"] and not bench.logged
    bench.running[0].result = news(1)
    bench.fleet.poll()
    assert bench.logged == [(-1, {"eval/held": 0.5, "eval/weight_version": 1, FAILED_EVALUATIONS: 0})]
    bench.fleet.poll()
    bench.fleet.finish()
    assert len(bench.logged) == 1, "once"


def test_no_weights_are_sent_while_an_evaluation_runs_and_none_is_left_out(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.fleet.begin(1)
    bench.version = 4

    def end(answer: Answer) -> None:
        answer.result = news(1 if answer is bench.running[0] else 4)

    bench.on_wait = end
    bench.fleet.begin(3)
    assert bench.log == ["send 1", "begin 1", "wait", "send 4", "begin 3"]
    assert "the evaluation after step 1" in caplog.text and "--eval-fleet" in caplog.text
    bench.fleet.finish()
    assert [(step, row["eval/weight_version"]) for step, row in bench.logged] == [(1, 1), (3, 4)]


@pytest.mark.parametrize("what", ["weights", "no engine", "evaluation", "lost", "version"])
def test_a_failed_evaluation_is_counted_under_its_step_and_the_next_one_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    strict = Bench(monkeypatch, must_work=True)
    for one in (strict, bench):
        monkeypatch.setattr(training_run, "wait_for", one._wait)
        if what == "weights":
            one.refuses = WeightSyncError("differ")
        one.serving = what != "no engine"
        failed = False
        try:
            one.fleet.begin(2)
            if what == "lost":
                one.serving = False
            elif one.running:
                one.running[0].result = EngineError("too many failed") if what == "evaluation" else news(9)
            one.fleet.poll()
        except SlimeError:
            failed = True
        assert failed == (one is strict), "asked for"
    assert bench.logged == [(2, {FAILED_EVALUATIONS: 1})]
    assert ("abandon" in bench.log) == (what == "lost")
    bench.refuses, bench.serving = None, True
    bench.fleet.begin(4)
    bench.running[-1].result = news(1)
    bench.fleet.finish()
    assert bench.logged[-1] == (4, {"eval/held": 0.5, "eval/weight_version": 1, FAILED_EVALUATIONS: 1})


def test_the_last_evaluation_waits_for_an_engine_that_is_being_restarted(bench: Bench) -> None:
    bench.serving, bench.restarts = False, True
    bench.fleet.begin(2)
    assert not bench.running and bench.logged == [(2, {FAILED_EVALUATIONS: 1})], "training goes on"
    bench.fleet.begin(4, is_last=True)
    bench.running[0].result = news(1)
    bench.fleet.finish()
    assert bench.logged[-1] == (4, {"eval/held": 0.5, "eval/weight_version": 1, FAILED_EVALUATIONS: 1})


@pytest.mark.parametrize("error", [ActorDied("the rollout process died"), DataError("none has a score")])
def test_an_error_that_is_not_the_fleets_ends_the_run(bench: Bench, error: SlimeError) -> None:
    bench.fleet.begin(2)
    bench.running[0].result = error
    with pytest.raises(type(error)):
        bench.fleet.poll()
