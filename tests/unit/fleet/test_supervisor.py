"""Laws of the fleet: who gets requests, who gets weights, and that the dead come back or end the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slime.cli.main import main
from slime.core.errors import EngineError
from slime.core.topology import DEFAULT_NAME, Worker
from slime.fleet.supervisor import (
    DRAINED,
    LONGEST_PAUSE_S,
    LOSSES_WITHIN_S,
    MAX_FAILURES,
    MAX_LOSSES,
    NEXT,
    PAUSE_S,
    Engine,
    FleetFiles,
    Membership,
    State,
    Supervisor,
)


class FakePort:
    """Engines without processes: a test says what is wrong with them and which ones answer."""

    def __init__(self) -> None:
        self.wrong: dict[int, str] = {}
        self.log: list[str] = []
        self.answers: dict[int, str | Exception] = {}
        self.joined: list[tuple[Engine, str]] = []
        self.hostless: set[int] = set()

    def has_host(self, index: int) -> bool:
        return index not in self.hostless

    def troubles(self) -> dict[int, str]:
        return dict(self.wrong)

    def start(self, engine: Engine) -> None:
        self.log.append(f"start {engine.index}.{engine.incarnation}")
        self.wrong.pop(engine.index, None)

    def started(self, index: int) -> str | None:
        answer = self.answers.pop(index, None)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def newcomers(self) -> list[tuple[Engine, str]]:
        joined, self.joined = self.joined, []
        return joined

    def stop(self, indices: Sequence[int]) -> list[object]:
        self.log += [f"stop {index}" for index in indices]
        return []

    def dismiss(self, engine: Engine) -> None:
        self.log.append(f"dismiss {engine.index}.{engine.incarnation}")


class Fleet:
    """Engines that serve version 1, their supervisor, and a clock that a test moves."""

    def __init__(
        self,
        num: int = 2,
        *,
        restarts: bool = True,
        models: tuple[str, ...] = (),
        workers: tuple[Worker, ...] = (),
        vital: Callable[[Engine], bool] = lambda engine: True,
    ) -> None:
        self.port, self.now = FakePort(), 0.0
        kinds = zip(models or (DEFAULT_NAME,) * num, workers or (Worker.REGULAR,) * num, strict=True)
        self.members = Membership(
            Engine(i, (i,), model=model, worker=worker) for i, (model, worker) in enumerate(kinds)
        )
        self.supervisor = Supervisor(self.members, self.port, restarts=restarts, vital=vital, clock=lambda: self.now)
        for i in range(num):
            self.supervisor.up(i, f"http://{i}")
        self.supervisor.synced(self.members.engines, 1)

    def states(self) -> list[State]:
        return [engine.state for engine in self.members.engines]

    def replace(self, index: int) -> None:
        """The engine is lost, started again, and answers."""
        self.port.wrong[index] = "killed"
        self.supervisor.tend()
        self.now += 100.0
        self.supervisor.tend()
        self.port.answers[index] = f"http://{index}-{self.members[index].incarnation}"
        self.supervisor.tend()


def test_a_lost_engine_is_dismissed_started_again_and_serves_after_a_weight_sync() -> None:
    fleet = Fleet()
    fleet.port.wrong[1] = "process 7 (sglang::schedul) has ended"
    fleet.supervisor.tend()
    assert fleet.states() == [State.READY, State.DEAD] and fleet.members[1].url is None
    assert fleet.port.log == ["dismiss 1.0"], "nobody sends to it any more, before anything else"
    fleet.supervisor.tend()
    assert fleet.port.log == ["dismiss 1.0"], "and it is not started at once"
    fleet.now += PAUSE_S
    fleet.supervisor.tend()
    assert fleet.port.log[1:] == ["start 1.1"] and fleet.states()[1] is State.STARTING
    fleet.supervisor.tend()
    assert not fleet.supervisor.wants_weights()
    fleet.port.answers[1] = "http://new"
    fleet.supervisor.tend()
    (joiner,) = fleet.supervisor.wants_weights()
    assert (joiner.index, joiner.url, joiner.version, joiner.incarnation) == (1, "http://new", None, 1)
    fleet.supervisor.synced([joiner], 4)
    assert fleet.states() == [State.READY, State.READY] and fleet.members[1].version == 4


@pytest.mark.parametrize("how", ["no restarts", "starts fail", "often", "no host"])
def test_the_run_goes_on_without_an_engine_that_is_not_vital(how: str) -> None:
    """Law: what would end the run for any other engine leaves this one dead, once and for all unless its host is
    only absent."""
    models = ("policy", "evaluation")
    fleet = Fleet(2, models=models, restarts=how != "no restarts", vital=lambda engine: engine.model == "policy")
    if how == "no host":
        fleet.port.hostless.add(1)
    losses = {"no restarts": 1, "starts fail": MAX_FAILURES, "often": MAX_LOSSES, "no host": 1}[how]
    for loss in range(losses):
        fleet.port.wrong[1] = "killed"
        fleet.supervisor.tend()
        fleet.now += LONGEST_PAUSE_S
        if loss + 1 < losses:
            fleet.supervisor.tend()
            fleet.port.answers[1] = "http://again"
            fleet.supervisor.tend()
            if how == "often":
                fleet.supervisor.synced([fleet.members[1]], 1)
    starts = sum(line.startswith("start ") for line in fleet.port.log)
    for _ in range(3):
        fleet.now += LONGEST_PAUSE_S
        fleet.supervisor.tend()
    assert fleet.states() == [State.READY, State.DEAD]
    assert sum(line.startswith("start ") for line in fleet.port.log) == starts
    fleet.port.hostless.clear()
    fleet.supervisor.tend()
    assert fleet.states()[1] is (State.STARTING if how == "no host" else State.DEAD)


def test_an_engine_that_was_replaced_during_a_weight_sync_does_not_serve_what_another_one_got() -> None:
    fleet = Fleet(1)
    fleet.supervisor.syncing(fleet.members.engines)
    before = fleet.members.engines
    fleet.replace(0)
    fleet.supervisor.synced(before, 2)
    assert fleet.states() == [State.SYNCING] and fleet.members[0].version is None
    fleet.supervisor.tainted(before, "failed")
    assert fleet.states() == [State.SYNCING]


def test_what_a_failed_weight_sync_left_gets_no_requests_until_the_next_one() -> None:
    fleet = Fleet()
    fleet.supervisor.syncing(fleet.members.engines)
    fleet.supervisor.tainted(fleet.members.engines, "digests differ")
    assert fleet.states() == [State.TAINTED] * 2 and fleet.members[0].reason == "digests differ"
    assert len(fleet.supervisor.wants_weights()) == 2
    fleet.supervisor.syncing(fleet.members.engines)
    fleet.supervisor.synced(fleet.members.engines, 2)
    assert [engine.version for engine in fleet.members.engines] == [2, 2]


def test_an_engine_that_only_ever_ends_ends_the_run_with_what_it_said() -> None:
    fleet = Fleet()
    fleet.port.wrong[0] = "killed"
    fleet.supervisor.tend()
    pauses = []
    for failure in range(1, MAX_FAILURES):
        began = fleet.now
        while fleet.states()[0] is State.DEAD:
            fleet.now += 0.5
            fleet.supervisor.tend()
        pauses.append(fleet.now - began)
        fleet.port.answers[0] = EngineError("out of memory")
        if failure == MAX_FAILURES - 1:
            with pytest.raises(EngineError, match=r"engine 0 failed 3 times .* out of memory"):
                fleet.supervisor.tend()
        else:
            fleet.supervisor.tend()
    assert pauses == [PAUSE_S, 2 * PAUSE_S], "each time it waits longer"


def test_one_that_served_in_between_is_started_as_often_as_it_is_rarely_lost() -> None:
    fleet = Fleet()
    for round_ in range(3 * MAX_LOSSES):
        fleet.replace(0)
        fleet.supervisor.synced(fleet.supervisor.wants_weights(), 2)
        assert fleet.members[0].incarnation == round_ + 1 and fleet.states()[0] is State.READY
        fleet.now += LOSSES_WITHIN_S / (MAX_LOSSES - 1)


def starts_of_a_sick_one(fleet: Fleet, *, start_s: float) -> int:
    """How often engine 0 is started that takes `start_s` to answer and ends 5 s after each admission."""
    for _ in range(5 * MAX_LOSSES):
        fleet.now += 5.0
        fleet.port.wrong[0] = "its scheduler ended"
        for _ in range(100):
            fleet.supervisor.tend()
            if fleet.states()[0] is State.STARTING:
                break
            fleet.now += 1.0
        else:
            break
        fleet.now += start_s
        fleet.port.answers[0] = "http://0"
        fleet.supervisor.tend()
        fleet.supervisor.synced(fleet.supervisor.wants_weights(), 2)
    return sum(line.startswith("start 0.") for line in fleet.port.log)


@pytest.mark.parametrize("start_s", [1.0, 900.0])
def test_a_sick_engine_is_left_out_however_long_its_starts_take(
    start_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: one that is lost soon after each admission is started so often and no more; those that are well serve on."""
    fleet = Fleet()
    assert starts_of_a_sick_one(fleet, start_s=start_s) == MAX_LOSSES - 1
    assert fleet.states() == [State.DEAD, State.READY] and fleet.port.log[-1] == "stop 0"
    assert "engine 0 failed 10 times within 1 h of serving, so it is not restarted" in caplog.text
    fleet.port.hostless, fleet.port.wrong = {1}, {1: "gone"}
    with pytest.raises(EngineError, match=r"is left \(1 without a host, 1 failed too often\)"):
        fleet.supervisor.tend()


def test_a_sick_engine_that_is_the_only_one_ends_the_run() -> None:
    with pytest.raises(
        EngineError, match=r"engine 0 failed 10 times .* no other engine of model default is left.*ended"
    ):
        starts_of_a_sick_one(Fleet(1), start_s=60.0)


def test_one_of_somebody_else_that_never_lasts_is_taken_again_ever_later() -> None:
    members = Membership([Engine(0, (), external=True)])
    supervisor = Supervisor(members, FakePort(), clock=lambda: 0.0)
    for _ in range(3 * MAX_LOSSES):
        supervisor.up(0, "http://0")
        supervisor.synced(members.engines, 1)
        supervisor.lost(members[0], "it ended")
        members.change(0, State.STARTING)
    assert supervisor._again_at[0] == LONGEST_PAUSE_S


def test_an_engine_waits_for_its_host_and_the_others_serve_meanwhile() -> None:
    fleet = Fleet()
    fleet.port.hostless = {1}
    for seconds in (0.0, 10.0, 1000.0):
        fleet.port.wrong[1] = "its owner has not responded for 30 s"
        fleet.now += seconds
        fleet.supervisor.tend()
    assert fleet.states() == [State.READY, State.DEAD] and fleet.port.log == ["dismiss 1.0"]
    fleet.port.hostless.clear()
    for failure in range(1, MAX_FAILURES):
        fleet.now += 100.0
        fleet.supervisor.tend()
        fleet.port.answers[1] = EngineError("it is still coming up")
        fleet.supervisor.tend()
        assert fleet.port.log[-2:] == [f"start 1.{failure}", f"dismiss 1.{failure}"], "the loss itself was no failure"


def test_one_that_somebody_else_starts_may_be_left_alone_for_longer() -> None:
    supervisor = Supervisor(members := Membership([Engine(0, (), external=True)]), FakePort(), clock=lambda: 0.0)
    for longest in ({"longest_s": 3600.0}, {}):
        for _ in range(20):
            supervisor.up(0, "http://0")
            supervisor.lost(members[0], "it refuses", **longest)
            members.change(0, State.STARTING)
        assert supervisor._again_at[0] == longest.get("longest_s", LONGEST_PAUSE_S)


def test_a_host_that_is_lost_is_no_failure_of_its_engine_and_forgives_those_before() -> None:
    """Law: also one that is back before anybody looked for it; on a new host an engine starts to count anew."""
    fleet = Fleet()
    for _ in range(2 * MAX_LOSSES):
        fleet.port.hostless = {1}
        fleet.port.wrong[1] = "gone"
        fleet.supervisor.tend()
        fleet.port.hostless = set()
        fleet.replace(1)
    for hostless in (set[int](), {1}):
        for _ in range(MAX_FAILURES - 2):
            fleet.replace(1)
        fleet.port.hostless, fleet.port.wrong[1] = hostless, "gone"
        fleet.supervisor.tend()
        fleet.now += 100.0
        fleet.supervisor.tend()
        fleet.port.hostless = set()
    assert fleet.states()[1] is State.DEAD
    for _ in range(MAX_FAILURES - 1):
        fleet.replace(1)
    assert fleet.states() == [State.READY, State.SYNCING]


def test_an_engine_whose_host_came_back_is_said_to_serve_again(caplog: pytest.LogCaptureFixture) -> None:
    """Law: the word comes after every loss, also one that counts as no failure, and once."""
    fleet = Fleet()
    fleet.port.hostless, fleet.port.wrong = {1}, {1: "gone"}
    fleet.supervisor.tend()
    fleet.port.hostless.clear()
    fleet.now += 100.0
    with caplog.at_level("INFO"):
        fleet.replace(1)
        for version in (2, 3):
            fleet.supervisor.syncing([fleet.members[1]])
            fleet.supervisor.synced([fleet.members[1]], version)
    assert [r.getMessage() for r in caplog.records if "serves again" in r.message] == [
        "engine 1 serves again, at version 2"
    ]


def test_an_engine_that_starts_on_a_host_that_is_lost_then_waits_for_it() -> None:
    """Law: Ray tells of a lost host late; until then a start there neither ends nor fails."""
    fleet = Fleet()
    fleet.port.wrong[1] = "its owner has not responded for 30 s"
    fleet.supervisor.tend()
    fleet.now += PAUSE_S
    fleet.supervisor.tend()
    assert fleet.states()[1] is State.STARTING
    fleet.port.hostless = {1}
    for _ in range(3 * MAX_FAILURES):
        fleet.now += 100.0
        fleet.supervisor.tend()
    assert fleet.states() == [State.READY, State.DEAD] and fleet.port.log.count("start 1.1") == 1


def test_a_drained_engine_stays_away_until_it_is_taken_back() -> None:
    fleet = Fleet()
    assert fleet.supervisor.drain(1) == "" and fleet.states() == [State.READY, State.DEAD]
    assert fleet.port.log == ["dismiss 1.0", "stop 1"], "its requests move before it stops"
    assert fleet.supervisor.drain(1) == "" and len(fleet.port.log) == 2, "once"
    for _ in range(3):
        fleet.now += 1000.0
        fleet.supervisor.tend()
    assert fleet.states()[1] is State.DEAD and not fleet.supervisor.expects("policy")
    fleet.supervisor.take_back(1)
    fleet.supervisor.tend()
    assert fleet.port.log[2:] == ["start 1.1"]
    fleet.port.answers[1] = "http://again"
    fleet.supervisor.tend()
    assert [engine.index for engine in fleet.supervisor.wants_weights()] == [1], "it serves after a weight sync"
    fleet.supervisor.synced(fleet.supervisor.wants_weights(), 2)
    assert fleet.states() == [State.READY] * 2 and not fleet.supervisor.drained


def test_the_last_engine_of_a_kind_is_not_drained() -> None:
    fleet = Fleet(3, models=("actor", "actor", "judge"))
    assert fleet.supervisor.drain(2) == "engine 2 is not drained, because no other engine of model judge is left"
    assert fleet.supervisor.drain(0) == "" and "no other engine of model actor" in fleet.supervisor.drain(1)
    assert fleet.states() == [State.DEAD, State.READY, State.READY]
    fleet.port.hostless, fleet.port.wrong = {1}, {1: "gone"}
    with pytest.raises(EngineError, match=r"model actor is left \(1 without a host, 1 drained\); gone"):
        fleet.supervisor.tend()
        fleet.now += PAUSE_S
        fleet.supervisor.tend()


def test_the_last_engine_that_serves_is_not_drained_while_others_start() -> None:
    fleet = Fleet()
    fleet.port.wrong[1] = "gone"
    fleet.supervisor.tend()
    fleet.now += PAUSE_S
    fleet.supervisor.tend()
    assert fleet.states() == [State.READY, State.STARTING]
    assert fleet.supervisor.drain(0) == "engine 0 is not drained, because no other engine of model default is ready yet"
    assert fleet.supervisor.drain(1) == "" and fleet.states() == [State.READY, State.DEAD]


def test_an_engine_in_a_weight_sync_is_drained_after_it() -> None:
    fleet = Fleet()
    fleet.supervisor.syncing(fleet.members.engines)
    assert fleet.supervisor.drain(1) == "" and fleet.port.log == []
    fleet.supervisor.synced(fleet.members.engines, 2)
    assert fleet.supervisor.drain(1) == "" and fleet.port.log == ["dismiss 1.0", "stop 1"]


def test_a_loss_does_not_count_for_a_drained_engine() -> None:
    fleet = Fleet()
    for _ in range(2 * MAX_LOSSES):
        fleet.supervisor.drain(1)
        fleet.supervisor.take_back(1)
        fleet.supervisor.tend()
        fleet.port.answers[1] = "http://again"
        fleet.supervisor.tend()
        fleet.supervisor.synced(fleet.supervisor.wants_weights(), 2)
    assert fleet.states() == [State.READY] * 2


def test_files_carry_orders_to_a_run_and_its_engines_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, fleet = FleetFiles(tmp_path), Fleet(2)
    (tmp_path / "run.json").write_text("{}")

    def command(*words: str) -> str:
        """Returns the exit code and the last line."""
        code = main(["fleet", str(tmp_path), *words, "--wait-s", "0"])
        said = capsys.readouterr()
        return f"{code} {(said.out + said.err).splitlines()[-1]}"

    assert "the run has ended or has no engines" in command()
    run.write(fleet.members.engines, (), {})
    assert command() == "0 engine 1 of default: ready at version 1"
    assert "engines and hosts of this run are 0, 1; 7 is not among them" in command("drain", "7")
    assert command("drain", "1").startswith("1 the run has not followed within 0 s") and run.drained() == {"1"}
    run.write(fleet.members.engines, {1}, {})
    assert command("drain", "1") == "0 engine 1 of default: drained at version 1"
    assert command("add", "1").startswith("1 the run has not followed") and run.drained() == set()
    run.write(fleet.members.engines, (), {1: "engine 1 is not drained, because it is the last"})
    assert command("drain", "1") == "1 engine 1 is not drained, because it is the last"
    assert run.drained() == set(), "a refused order does not come true later"
    run.write(fleet.members.engines, {0}, {1: "engine 1 is not drained, because it is the last"})
    assert command("drain", "0", "1").startswith("1 engine 1 is not drained") and run.drained() == {"0"}
    away = replace(fleet.members.engines[1], state=State.DEAD, reason=DRAINED)
    run.write([away], (), {})
    assert command("add", "1").startswith("1 the run has not followed"), "it has not begun to start"
    run.begin()
    assert run.drained() == set() and not (tmp_path / "fleet.json").exists()


def test_a_fleet_without_a_host_ends_the_run() -> None:
    fleet = Fleet()
    fleet.port.hostless, fleet.port.wrong = {0, 1}, {0: "gone", 1: "gone"}
    fleet.supervisor.tend()
    fleet.now += PAUSE_S
    with pytest.raises(EngineError, match=r"no engine of model default is left \(2 without a host\); gone"):
        fleet.supervisor.tend()


@pytest.mark.parametrize("lost", ["actor", "judge"])
def test_a_model_without_a_host_ends_the_run_however_well_another_one_is_served(lost: str) -> None:
    fleet = Fleet(4, models=("actor", "actor", "judge", "judge"))
    gone = {engine.index for engine in fleet.members.engines if engine.model == lost}
    fleet.port.hostless, fleet.port.wrong = {min(gone)}, {min(gone): "gone"}
    fleet.supervisor.tend()
    fleet.now += PAUSE_S
    fleet.supervisor.tend()
    assert fleet.states().count(State.READY) == 3, "another engine of the model serves on"
    fleet.port.hostless, fleet.port.wrong = gone, {max(gone): "gone"}
    with pytest.raises(EngineError, match=rf"no engine of model {lost} is left \(2 without a host\); gone"):
        fleet.supervisor.tend()


@pytest.mark.parametrize("half", [Worker.PREFILL, Worker.DECODE])
def test_a_half_of_the_pairs_without_a_host_ends_the_run(half: Worker) -> None:
    """Law: the other half answers for nobody."""
    fleet = Fleet(4, workers=(Worker.PREFILL, Worker.PREFILL, Worker.DECODE, Worker.DECODE))
    gone = {engine.index for engine in fleet.members.engines if engine.worker is half}
    fleet.port.hostless, fleet.port.wrong = gone, dict.fromkeys(gone, "gone")
    fleet.supervisor.tend()
    fleet.now += PAUSE_S
    with pytest.raises(EngineError, match=r"2 without a host\); gone"):
        fleet.supervisor.tend()


def test_without_fault_tolerance_the_first_loss_ends_the_run() -> None:
    fleet = Fleet(restarts=False)
    fleet.port.wrong[1] = "killed"
    with pytest.raises(EngineError, match="--no-use-fault-tolerance"):
        fleet.supervisor.tend()
    assert fleet.port.log == ["dismiss 1.0"]


def test_followers_hear_every_change_in_order() -> None:
    fleet, heard = Fleet(), list[tuple[str, str]]()
    fleet.members.follow(lambda before, after: heard.append((before.state.value, after.state.value)))
    fleet.replace(1)
    assert heard == [("ready", "dead"), ("dead", "starting"), ("starting", "syncing")]


@pytest.mark.parametrize("state", list(State))
def test_no_other_way_leads_from_one_state_to_the_next(state: State) -> None:
    engine = Engine(0, (0,), url="http://0", state=state)
    for other in State:
        if other in NEXT[state]:
            assert engine.moved(other).state is other
        else:
            with pytest.raises(AssertionError):
                engine.moved(other)


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: only verified engines serve, and only those that answer are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        self.fleet, self.version, self.synced = Fleet(3), 1, {(i, 0): 1 for i in range(3)}
        self.failed, self.lost = [0, 0, 0], [0, 0, 0]
        """Of each engine how often since it served, and since the beginning."""

    def tend(self) -> None:
        """The run may end, if an engine failed as often as it may; then another one begins."""
        try:
            self.fleet.supervisor.tend()
        except EngineError:
            left = [n for i, n in enumerate(self.lost) if i not in self.fleet.supervisor.drained]
            assert max(self.failed) >= MAX_FAILURES or min(left) >= MAX_LOSSES, "the run ended without need"
            self.begin()

    @rule(index=st.integers(0, 2), drains=st.booleans())
    def drains(self, index: int, drains: bool) -> None:
        if drains:
            self.fleet.supervisor.drain(index)
            self.fleet.port.wrong.pop(index, None)
        else:
            self.fleet.supervisor.take_back(index)
        away = self.fleet.supervisor.drained
        assert len(away) < 3 and all(self.fleet.states()[i] is State.DEAD for i in away)

    @rule(index=st.integers(0, 2))
    def fails(self, index: int) -> None:
        if self.fleet.members[index].answers and index not in self.fleet.port.wrong:
            self.fleet.port.wrong[index] = "killed"
            self.failed[index] += 1
            self.lost[index] += 1

    @rule(index=st.integers(0, 2))
    def answers(self, index: int) -> None:
        if self.fleet.states()[index] is State.STARTING:
            self.fleet.port.answers[index] = f"http://{index}-{self.fleet.members[index].incarnation}"

    @rule(seconds=st.floats(0.1, 10.0))
    def tends(self, seconds: float) -> None:
        self.fleet.now += seconds
        self.tend()

    @precondition(lambda self: self.fleet.members.in_states(State.SYNCING, State.READY, State.TAINTED))
    @rule(succeeds=st.booleans(), tends=st.booleans(), joiners=st.booleans())
    def syncs(self, succeeds: bool, tends: bool, joiners: bool) -> None:
        supervisor, members = self.fleet.supervisor, self.fleet.members
        takers = supervisor.wants_weights() if joiners else members.in_states(State.SYNCING, State.READY, State.TAINTED)
        supervisor.syncing(takers)
        self.version += 1
        if tends:
            self.tend()
            if self.fleet.supervisor is not supervisor:
                return
        if succeeds:
            supervisor.synced(takers, self.version)
            self.synced |= {(e.index, e.incarnation): self.version for e in takers}
        else:
            supervisor.tainted(takers, "failed")

    @invariant()
    def only_verified_engines_serve(self) -> None:
        for engine in self.fleet.members.engines:
            if engine.state is State.READY:
                if engine.index not in self.fleet.port.wrong:
                    self.failed[engine.index] = 0
                assert engine.version == self.synced[engine.index, engine.incarnation]
            else:
                assert engine.version is None
            assert engine.answers is (engine.state not in (State.DEAD, State.STARTING))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
