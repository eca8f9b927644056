"""The order of a weight sync as the driver runs it, and of the two asynchronous loops around it."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster.engine_tracker import EngineInfo
from slime.cluster.weight_sync_sequence import (
    NUM_TRIES,
    EndRequests,
    MemoryHandOver,
    PauseChoice,
    WeightSyncSequence,
    with_pauses,
)
from slime.core.errors import EngineError, WeightSyncError
from slime.core.topology import EngineLayout
from slime.settings.conditions import pause_modes, requests_continue
from slime.settings.groups.hooks import DEFAULT_ROLLOUT, SFT_ROLLOUT
from tests.support.recording import RecordingActors, RecordingRun
from train_async import fully_async, one_step_off

SYNC, RESUME, ADMIT = "trainers sync_weights", "rollout resume", "rollout admit ['http://0']"
PAUSE, HAND_BACK = "rollout pause False", "rollout pause True"
HANDED_OVER = [
    "engines release_memory",
    "trainers wake",
    "trainers keep_weights",
    "engines resume_memory ['weights']",
    SYNC,
    "trainers sleep",
    "engines resume_memory ['kv_cache', 'cuda_graph']",
]
"""A step's memory and weights, in the only order that fits."""


def sequence(actors: RecordingActors, **given: Any) -> tuple[WeightSyncSequence, MemoryHandOver, dict[str, float]]:
    """A sequence over these actors, its memory, and the metrics that it tells."""
    usual: dict[str, Any] = {
        "fully_async": False,
        "rollout_function_path": DEFAULT_ROLLOUT,
        "pause_generation_mode": "abort",
        "save": "save",
        "engine_start_timeout_s": 60.0,
        "offload_rollout": False,
        "offload_train": False,
        "device": "cpu",
        "debug_train_only": False,
        "debug_rollout_only": False,
        "update_weight_transport": "tensor",
    }
    args: Any = SimpleNamespace(**{**usual, **given})
    told: dict[str, float] = {}
    tracker: Any = SimpleNamespace(add=told.update, progress=nullcontext)
    double: Any = actors
    memory = MemoryHandOver(args, double, tracker)
    return WeightSyncSequence(args, double, memory=memory, tracker=tracker), memory, told


def test_the_router_takes_engines_after_their_first_weight_sync_and_once() -> None:
    actors = RecordingActors()
    weight_sync, _, told = sequence(actors)
    weight_sync.run(for_save=False)
    weight_sync.run(for_save=True)
    assert actors.log == [SYNC, ADMIT, SYNC] and told == {"perf/x": 1.0, "perf/weight_version": 3.0}
    assert actors.engines.served == [3, 3], "as the trainer calls it"


def test_what_the_driver_waited_for_is_added_by_cause_on_all_gpus() -> None:
    whole = "perf/paused_token_seconds"
    engines = [EngineInfo(i, f"http://{i}", EngineLayout(tp_size=2), (0, 1)) for i in range(3)]
    found = with_pauses(
        {whole: 12.0, f"{whole}/abort": 3.0, f"{whole}/transfer": 9.0}, {"abort": 0.5, "transfer": 1.0}, engines
    )
    assert found == {whole: 21.0, f"{whole}/abort": 6.0, f"{whole}/transfer": 15.0}
    assert with_pauses({"perf/x": 1.0}, {"abort": 0.5}, engines) == {"perf/x": 1.0}, "a run that sends no weights"


def test_colocated_memory_changes_hands_in_the_only_order_that_fits() -> None:
    actors = RecordingActors()
    weight_sync, memory, _ = sequence(actors, offload_rollout=True, offload_train=True)
    weight_sync.run(for_save=False)
    start = ["trainers keep_weights", SYNC, "trainers sleep", ADMIT]
    assert actors.log == start, "engines have their memory when they start"
    actors.log.clear()
    memory.to_trainer()
    weight_sync.run(for_save=False)
    assert actors.log == HANDED_OVER


def test_a_trainer_that_lent_its_gpu_at_the_start_takes_its_weights_alone_for_the_first_weight_sync() -> None:
    """Beside what an engine takes of a whole GPU there is no room: it gives all of it back first."""
    actors = RecordingActors()
    weight_sync, memory, _ = sequence(actors, offload_rollout=True, offload_train=True, device="cuda")
    weight_sync.run(for_save=False)
    assert actors.log == [*(step for step in HANDED_OVER if step != "trainers wake"), ADMIT]
    actors.log.clear()
    memory.to_trainer()
    weight_sync.run(for_save=False)
    assert actors.log == HANDED_OVER, "as in every later step"


@pytest.mark.parametrize("step", ["to_trainer", "room_for_weights"])
def test_an_engine_that_was_taking_memory_gives_it_before_the_trainer_takes_any(step: str) -> None:
    """Law: nobody may begin to take memory that the trainer is about to take, and who has begun gives it, too."""
    actors = RecordingActors()
    _, memory, _ = sequence(actors, offload_train=True, offload_rollout=True, colocate=True, device="cuda")
    memory.room_for_weights()
    memory.room_for_the_rest()
    assert memory.is_lent
    seen: list[bool] = []
    actors.engines.on_settle = lambda: (seen.append(memory.is_lent), actors.log.append("settled"))[0]
    actors.log.clear()
    getattr(memory, step)()
    assert seen == [False], "the gate is closed before the wait for those that went through it"
    assert actors.log[:3] == ["settled", "engines release_memory", f"trainers {TAKES[step]}"]


TAKES = {"to_trainer": "wake", "room_for_weights": "keep_weights"}
"""Step -> what the trainer does to take memory."""


def test_of_the_memory_that_ranks_saw_the_most_is_reported() -> None:
    class Unequal(RecordingActors):
        def on_trainers(self, method: str, *arguments: Any, **limits: Any) -> list[dict[str, float]]:
            super().on_trainers(method, *arguments)
            return [{"perf/a": 1.0, "perf/b": 5.0}, {"perf/a": 3.0}] if method == "keep_weights" else [{}, {}]

    actors = Unequal()
    _, memory, told = sequence(actors, offload_train=True)
    memory.room_for_weights()
    memory.room_for_the_rest()
    assert told == {"perf/a": 3.0, "perf/b": 5.0} and actors.log == ["trainers keep_weights", "trainers sleep"]


@pytest.mark.parametrize(
    "given, for_save, pause",
    [
        ({}, False, None),
        ({}, True, None),
        ({"fully_async": True}, False, PAUSE),
        ({"rollout_function_path": "own.keeps_a_thread"}, False, PAUSE),
        ({"fully_async": True}, True, HAND_BACK),
        ({"fully_async": True, "save": None}, True, PAUSE),
        ({"fully_async": True, "pause_generation_mode": "retract"}, False, None),
        ({"fully_async": True, "pause_generation_mode": "retract"}, True, HAND_BACK),
        ({"fully_async": True, "pause_generation_mode": "in_place"}, True, HAND_BACK),
        ({"fully_async": True, "pause_generation_mode": "in_place", "save": None}, True, None),
    ],
)
def test_requests_end_where_nothing_else_would_keep_their_tokens(
    given: dict[str, Any], for_save: bool, pause: str | None
) -> None:
    actors = RecordingActors()
    weight_sync, _, _ = sequence(actors, **given)
    weight_sync.run(for_save=for_save)
    assert actors.log == ([pause, SYNC, RESUME, ADMIT] if pause else [SYNC, ADMIT])


def paused(abort: float, transfer: float = 1.0) -> dict[str, float]:
    """The metrics of a weight sync with these GPU-seconds."""
    causes = {"abort": abort, "flush": 0.01, "transfer": transfer, "verify": 0.1, "admission": 0.02}
    return {PAUSED: sum(causes.values()), **{f"{PAUSED}/{cause}": seconds for cause, seconds in causes.items()}}


PAUSED = "perf/paused_token_seconds"


@pytest.mark.parametrize("cheap, dear", [("abort", "retract"), ("retract", "abort")])
def test_auto_tries_each_mode_in_turn_and_keeps_the_one_that_pauses_for_less_time(
    cheap: str, dear: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither one slow weight sync nor the time of the transfer, which the mode does not change, decides."""
    caplog.set_level(logging.INFO)
    choice, tried = PauseChoice(("abort", "retract")), []
    for turn in range(2 * NUM_TRIES):
        tried.append(choice.mode)
        usual = 0.1 if choice.mode == cheap else 0.5
        choice.note(paused(9.0 if turn < 2 and choice.mode == cheap else usual, 5.0 if choice.mode == cheap else 1.0))
        assert turn == 2 * NUM_TRIES - 1 or not caplog.messages
    assert tried == ["abort", "retract"] * NUM_TRIES and choice.mode == cheap
    (said,) = caplog.messages
    assert f"weight syncs use {cheap} from now on" in said and f"{cheap} 0.130" in said and f"{dear} 0.530" in said
    choice.note(paused(99.0))
    assert choice.mode == cheap and len(caplog.messages) == 1, "it decides once"


def test_a_mode_that_was_asked_for_is_kept_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    choice = PauseChoice(("retract",))
    for _ in range(2 * NUM_TRIES):
        choice.note(paused(1.0))
    assert choice.mode == "retract" and not caplog.messages


class MeasuringActors(RecordingActors):
    """Notes the mode of each weight sync. Retracting costs less."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.modes: list[str] = []
        engine = EngineInfo(0, "http://0", EngineLayout(), (0,))
        setattr(self.engines, "infos", lambda engines: [engine])  # noqa: B010

    def on_trainers(self, method: str, *arguments: Any, **named: Any) -> list[dict[str, float]]:
        self.modes.append(arguments[1])
        found = super().on_trainers(method, *arguments, **named)
        return [each | paused(0.5 if arguments[1] == "abort" else 0.1) for each in found]


def test_with_auto_requests_end_where_the_mode_of_the_weight_sync_aborts_them() -> None:
    """The first weight sync, before which nothing was served, and those before a save say nothing about a mode."""
    actors, turns = MeasuringActors(), ["abort", "retract"] * NUM_TRIES
    weight_sync, _, _ = sequence(actors, fully_async=True, pause_generation_mode="auto")
    for for_save in (False, True, *[False] * len(turns), False, True):
        weight_sync.run(for_save=for_save)
    assert actors.modes == ["abort", "abort", *turns, "retract", "retract"]
    assert actors.log.count(PAUSE) == 1 + NUM_TRIES and actors.log.count(HAND_BACK) == 2


def test_engines_are_prepared_for_each_mode_that_the_run_may_use() -> None:
    def of(mode: str, fully_async: bool) -> tuple[tuple[str, ...], bool]:
        args: Any = SimpleNamespace(fully_async=fully_async, pause_generation_mode=mode)
        return pause_modes(args), requests_continue(args)

    assert of("auto", True) == (("abort", "retract"), True) and of("auto", False) == (("abort",), False)
    assert of("in_place", True) == (("in_place",), True) and of("abort", True) == (("abort",), False)


def test_where_no_request_runs_auto_aborts() -> None:
    actors = MeasuringActors()
    weight_sync, _, _ = sequence(actors, pause_generation_mode="auto")
    for _ in range(4 * NUM_TRIES):
        weight_sync.run(for_save=False)
    assert set(actors.modes) == {"abort"}


def test_after_an_error_nothing_is_served() -> None:
    class Failing(RecordingActors):
        def on_trainers(
            self, method: str, *arguments: Any, on_poll: Any = None, **limits: Any
        ) -> list[dict[str, float]]:
            raise WeightSyncError("differs")

    actors = Failing()
    weight_sync, _, _ = sequence(actors, fully_async=True)
    with pytest.raises(WeightSyncError):
        weight_sync.run(for_save=False)
    assert actors.log == [PAUSE]


def test_a_weight_sync_that_loses_an_engine_is_repeated_with_the_others() -> None:
    class Losing(RecordingActors):
        def on_trainers(
            self, method: str, *arguments: Any, on_poll: Any = None, **limits: Any
        ) -> list[dict[str, float]]:
            answer = super().on_trainers(method, *arguments)
            if method == "sync_weights" and self.engines.lose:
                raise EngineError("engine http://0 did not answer")
            return answer

    actors = Losing()
    actors.engines.lose = 2
    weight_sync, _, told = sequence(actors, fully_async=True)
    weight_sync.run(for_save=False)
    assert actors.log == [PAUSE, SYNC, SYNC, SYNC, RESUME, ADMIT] and told["perf/weight_version"] == 3.0


def test_the_sender_hears_once_of_each_engine_that_is_lost_while_it_waits() -> None:
    class Polling(RecordingActors):
        def on_trainers(
            self, method: str, *arguments: Any, on_poll: Any = None, **limits: Any
        ) -> list[dict[str, float]]:
            for lost in (0, 1, 1):
                self.engines.lose = lost
                assert on_poll() == "none"
            return super().on_trainers(method, *arguments)

    actors = Polling(num_engines=2)
    sequence(actors)[0].run(for_save=False)
    assert actors.log[:2] == ["sender gives up 0", SYNC]


@pytest.mark.parametrize(
    "lends, fresh, can_answer, joins, more",
    [
        (False, True, True, True, {}),
        (False, False, True, False, {}),
        (False, False, False, True, {}),
        (True, True, True, False, {}),
        (True, True, False, True, {}),
        (False, True, True, True, {"update_weight_transport": "disk"}),
        *[(False, True, True, False, {"update_weight_transport": name}) for name in ("distributed", "nccl", "mixed")],
        (False, True, False, True, {"update_weight_transport": "distributed"}),
        (False, True, True, True, {"update_weight_transport": "distributed", "debug_rollout_only": True}),
    ],
)
def test_an_engine_that_was_started_again_joins_unless_others_serve_what_it_could_not_have(
    lends: bool, fresh: bool, can_answer: bool, joins: bool, more: dict[str, Any]
) -> None:
    """Law: nor if a process group of all engines would have to be made for it alone, and for all again."""
    actors = RecordingActors()
    weight_sync, _, _ = sequence(actors, offload_train=lends, offload_rollout=lends, **more)
    weight_sync.join(fresh=fresh)
    assert actors.log == [], "nobody waits for weights"
    weight_sync.run(for_save=False)
    actors.log.clear()
    actors.engines.can_answer, actors.engines.waiting = can_answer, actors.engines.begin_sync()
    weight_sync.join(fresh=fresh)
    assert (SYNC in actors.log) is joins


def test_what_a_join_cost_is_told_beside_the_weight_sync_of_its_step() -> None:
    class Costly(RecordingActors):
        def on_trainers(self, method: str, *arguments: Any, **limits: Any) -> list[dict[str, float]]:
            return [{**super().on_trainers(method, *arguments)[0], "perf/update_weights_bytes": float(len(self.log))}]

    actors = Costly()
    weight_sync, _, told = sequence(actors)
    weight_sync.run(for_save=False)
    actors.engines.waiting = actors.engines.begin_sync()
    weight_sync.join(fresh=True)
    assert told["perf/update_weights_bytes"] == 1.0 and told["perf/join_bytes"] == float(len(actors.log))


@pytest.mark.parametrize("fresh, transport", [(True, "tensor"), (False, "tensor"), (True, "distributed")])
def test_both_engines_of_a_pair_get_the_weights_if_the_one_that_is_left_has_older_ones(
    fresh: bool, transport: str
) -> None:
    """Law: or if they share a process group, which the next weight sync then finds complete."""
    actors = RecordingActors(num_engines=2)
    weight_sync, _, _ = sequence(actors, update_weight_transport=transport)
    weight_sync.run(for_save=False)
    alone = actors.engines.begin_sync()[:1]
    actors.engines.can_answer, actors.engines.waiting = False, alone
    weight_sync.join(fresh=fresh)
    assert actors.engines.asked[-1] == (alone if fresh and transport == "tensor" else None)


def test_without_engines_nothing_happens_and_without_trainers_there_are_no_metrics() -> None:
    none, alone = RecordingActors(num_engines=0), RecordingActors(num_trainers=0)
    sequence(none, offload_train=True)[0].run(for_save=False)
    weight_sync, _, told = sequence(alone)
    weight_sync.run(for_save=False)
    assert none.log == [] and told == {} and alone.log == [SYNC, ADMIT]


def test_each_policy_has_its_settings() -> None:
    def of(fully_async: bool, mode: str, path: str = DEFAULT_ROLLOUT) -> EndRequests:
        args: Any = SimpleNamespace(fully_async=fully_async, rollout_function_path=path)
        return EndRequests.of(args, mode)

    assert of(False, "abort", SFT_ROLLOUT) is EndRequests.NEVER
    assert of(False, "abort", "own.keeps_a_thread") is EndRequests.ALWAYS

    assert of(False, "abort") is EndRequests.NEVER and of(False, "retract") is EndRequests.NEVER
    assert of(True, "abort") is EndRequests.ALWAYS and of(True, "in_place") is EndRequests.FOR_SAVES


def test_one_step_off_generates_ahead_and_syncs_between_generations() -> None:
    run = RecordingRun(num_rollout=4, save_every=2, sync_every=2, eval_every=3)
    verbs: Any = run
    one_step_off(verbs, range(1, 4))
    assert run.log == [
        "start 1",
        *["finish 1", "start 2", "train 1", "save 1", "wait 2", "sync", "check", "end 1"],
        *["finish 2", "start 3", "train 2", "eval 2", "end 2"],
        *["finish 3", "train 3", "save 3", "sync", "check", "eval 3", "end 3"],
    ]


def test_fully_async_saves_after_the_sync_and_checks_seldom() -> None:
    run = RecordingRun(num_rollout=5, save_every=3, sync_every=1, eval_every=9)
    verbs: Any = run
    fully_async(verbs, range(5))
    assert run.log == [
        *["start 0", "finish 0", "train 0", "sync", "check", "end 0"],
        *["start 1", "finish 1", "train 1", "sync", "end 1"],
        *["start 2", "finish 2", "train 2", "sync for save", "save 2", "check", "end 2"],
        *["start 3", "finish 3", "train 3", "sync", "end 3"],
        *["start 4", "finish 4", "train 4", "sync for save", "save 4", "check", "eval 4", "end 4"],
    ]


def test_a_run_that_is_over_starts_nothing() -> None:
    run = RecordingRun(num_rollout=3, save_every=1, sync_every=1, eval_every=1)
    verbs: Any = run
    one_step_off(verbs, range(3, 3))
    fully_async(verbs, range(4, 3))
    assert run.log == []
