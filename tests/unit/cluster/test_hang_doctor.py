"""When ranks count as standing still, and what messages call a process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.cluster.hang_doctor import (
    MOVED_BYTES,
    HangDoctor,
    Incident,
    Look,
    RunProcess,
    Stillness,
    StoppedProcesses,
    _Exam,
    name_of,
)
from slime.core.blame import Place
from slime.observability.stacks import Standing
from slime.serving.child_process import ProcessId

BUSY = Standing(
    "training rank 0", "node", 1, "S", (Place("/x/slime/training/backend.py", 3, "train"),), enqueued={"0": 4}
)
IDLE = replace(BUSY, places=())
SENDS = replace(BUSY, places=(Place("/x/slime/weights/sync.py", 9, "sync_weights"),))
LATE_S = 10.0


def look(standing: Standing, *, computed_s: float = 0.0, moved: int = 0) -> Look:
    return Look(standing, computed_s, moved)


def stillness(num_ranks: int, *, counts_cpu: bool = True) -> Stillness:
    return Stillness(num_ranks, 0.0, counts_cpu=counts_cpu)


def test_ranks_that_stand_still_do_so_since_the_last_of_them_moved() -> None:
    watch = stillness(2)
    for now in range(0, 40, 5):
        watch.saw(0, look(BUSY), float(now))
        watch.saw(1, look(replace(BUSY, enqueued={"0": min(now, 20)})), float(now))
    assert watch.since_s(35.0, LATE_S) == 20.0


def test_a_rank_without_a_call_is_not_standing_still() -> None:
    watch = stillness(1)
    for now in range(0, 40, 5):
        watch.saw(0, look(IDLE), float(now))
    assert watch.since_s(35.0, LATE_S) is None


def test_computing_counts_only_where_it_means_something_and_reading_counts_everywhere() -> None:
    for counts_cpu, moved, expected in ((True, 0, 35.0), (False, 0, 0.0), (False, MOVED_BYTES, 35.0)):
        watch = stillness(1, counts_cpu=counts_cpu)
        for now in range(0, 40, 5):
            watch.saw(0, look(BUSY, computed_s=float(now), moved=now * moved), float(now))
        assert watch.since_s(35.0, LATE_S) == expected, (counts_cpu, moved)


def test_a_rank_that_waits_for_an_engine_has_a_limit_of_its_own() -> None:
    watch = stillness(2)
    for now in range(0, 40, 5):
        watch.saw(0, look(SENDS), float(now))
        watch.saw(1, look(BUSY), float(now))
    assert watch.since_s(35.0, LATE_S) == 35.0


def test_a_rank_that_no_longer_answers_stands_still_since_its_last_answer() -> None:
    watch = stillness(2)
    watch.saw(0, look(IDLE), 5.0)
    for now in range(0, 40, 5):
        watch.saw(1, look(IDLE), float(now))
    assert watch.since_s(35.0, LATE_S) == 5.0


def test_a_host_whose_answer_is_late_has_not_continued_its_stopped_processes() -> None:
    """Law: a process counts as stopped from the first answer that names it to the first one of its host that does
    not, however often other hosts answer between them."""
    watch, one = StoppedProcesses(), RunProcess(ProcessId(41, 7), "training rank 1", "there", "T")
    watch.saw("there", [one], 5.0)
    watch.saw("here", [], 10.0)
    watch.saw("here", [], 15.0)
    watch.saw("there", [one], 17.0)
    assert watch.all() == {one.key: (5.0, one)}
    watch.saw("there", [], 20.0)
    assert watch.all() == {}


def test_a_host_that_is_gone_takes_its_stopped_processes_along() -> None:
    watch, one = StoppedProcesses(), RunProcess(ProcessId(41, 7), "training rank 1", "there", "T")
    watch.saw("there", [one], 5.0)
    watch.keep(["here"])
    assert watch.all() == {}


def test_a_process_is_named_after_the_log_that_it_writes(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for file, name in {
        "train_3.log": "training rank 3",
        "rollout.log": "the rollout process",
        "rollout_worker_1.log": "rollout worker 1",
        "engine_actor_0.log": "the actor of engine 0",
        "engine_0_2.log": "python of engine 0_2",
        "driver.log": "python",
    }.items():
        with (tmp_path / "logs" / file).open("w"):
            assert name_of(os.getpid(), "python") == name, file


def test_processes_of_two_hosts_with_one_pid_are_not_mixed_up(tmp_path: Path) -> None:
    """Law: the sentence about a stopped process has the line of the process on its own host."""
    said: list[str | None] = []
    args: Any = SimpleNamespace(run_id="r", hang_report_s=30.0, hang_limit_s=0.0, max_restarts=0, device="cpu")
    hosts: Any = SimpleNamespace(handles=list)
    doctor = HangDoctor(args, [], None, hosts, tmp_path, tell=lambda key, text: said.append(text))
    process = RunProcess(ProcessId(41, 7), "engine 3", "there", "T")
    assert replace(process, host="here").key != process.key
    standings = [
        Standing("rollout worker 0", "here", 41, "T", (Place("/mine/a.py", 1, "wrong"),)),
        Standing("engine 3", "there", 41, "T", (Place("/mine/b.py", 2, "right"),)),
    ]
    exam = _Exam(Incident(process.key, 0.0, process), "step 3", 9.0, {})
    doctor._conclude(exam, {}, standings, [], 10.0)
    assert said[0] is not None and "engine 3 on there is stopped" in said[0] and "b.py:2 in right" in said[0], said
