"""Who waits for whom, from stacks and torch's flight recorder; and what can be read of a process that is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from slime.core.blame import Place
from slime.observability.stacks import Pending, Standing, judge, pending_in, standing_here, standing_of

ROOT = Path(__file__).parents[3]
STEP = Place(str(ROOT / "slime/training/step/train_step.py"), 210, "train_on")
C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
LOADS = Place(str(ROOT / "slime/training/step/staging.py"), 40, "fetch")


def rank(
    number: int,
    *,
    inside: str | None = None,
    at: Place = STEP,
    state: str = "S",
    pending: Sequence[Pending] = (),
    newest: int | None = None,
) -> Standing:
    places = (at, Place(C10D, 3245, inside)) if inside else (at,)
    enqueued = None if newest is None else {"0": newest}
    return Standing(
        f"training rank {number}", f"node{number}", 100 + number, state, places, None, tuple(pending), enqueued
    )


def test_a_stopped_rank_is_the_cause_and_its_peers_wait_for_it() -> None:
    verdict = judge(
        [rank(0, inside="all_reduce"), rank(1, inside="all_reduce", state="T")], waits_for="training step 3"
    )
    assert verdict.text == (
        f"training rank 0 on node0 waits in all_reduce at {STEP} for training rank 1 on node1 during training step 3: "
        f"training rank 1 on node1 is stopped (state T; kill -CONT 101 continues it) in all_reduce at {STEP}"
    )
    assert [culprit.name for culprit in verdict.culprits] == ["training rank 1"]


def test_a_rank_outside_the_collective_is_the_cause() -> None:
    verdict = judge([rank(0, inside="broadcast"), rank(1, inside="broadcast"), rank(2, at=LOADS)])
    assert verdict.text == (
        f"training ranks 0, 1 wait in broadcast at {STEP} for training rank 2 on node2: "
        f"training rank 2 on node2 stands at {LOADS}"
    )


def test_a_rank_that_does_not_respond_is_the_cause() -> None:
    silent = Standing("training rank 1", "node1", 0, unread="it does not respond")
    verdict = judge([rank(0, inside="barrier"), silent])
    assert "training rank 0 on node0 waits in barrier" in verdict.text and "(it does not respond)" in verdict.text


def test_a_rank_that_never_entered_what_others_wait_in_is_behind() -> None:
    """On a GPU no stack shows the collective: every rank waits for its device, and only the numbers differ."""
    waiting = [rank(n, pending=[Pending("0", "all_reduce", 7)], newest=9) for n in (0, 1)]
    late = rank(2, at=LOADS, pending=[Pending("0", "all_gather", 5)], newest=5)
    verdict = judge([*waiting, late])
    assert verdict.culprits == (late,)
    assert verdict.text.startswith(f"training ranks 0, 1 wait in all_reduce at {STEP} for training rank 2 on node2")


def test_ranks_in_different_collectives_are_both_named() -> None:
    verdict = judge([rank(0, inside="all_reduce"), rank(1, inside="broadcast", at=LOADS)])
    assert verdict.culprits == () and "different collectives" in verdict.text
    assert f"training rank 0 on node0 in all_reduce at {STEP}" in verdict.text
    assert f"training rank 1 on node1 in broadcast at {LOADS}" in verdict.text


def test_ranks_that_all_wait_in_one_collective_blame_the_network() -> None:
    verdict = judge([rank(n, inside="all_reduce") for n in range(3)])
    assert verdict.culprits == () and "the network or a device" in verdict.text


def test_an_engine_is_named_at_its_own_line_rather_than_at_that_which_started_it() -> None:
    started = Place(str(ROOT / "slime/serving/launch.py"), 90, "main")
    loop = Place("/venv/lib/python3.11/site-packages/sglang/srt/managers/scheduler.py", 1400, "event_loop_normal")
    poll = Place("/venv/lib/python3.11/site-packages/zmq/sugar/socket.py", 970, "recv_pyobj")
    engine = Standing("sglang::scheduler of engine 1", "node1", 7, "T", (started, loop, poll))
    assert judge([engine]).text.endswith(f"continues it) at {loop}")


def test_many_ranks_are_counted_rather_than_listed() -> None:
    verdict = judge([rank(0, state="T"), *(rank(n, inside="all_reduce") for n in range(1, 513))])
    assert "training ranks 1, 2, 3, 4, 5, 6, 7, 8 and 504 more wait in all_reduce" in verdict.text
    assert len(verdict.text) < 600


def test_the_flight_recorder_is_read_by_the_names_of_groups() -> None:
    """Shape of torch 2.13's `_dump_fr_trace_json`."""
    entry = {"pg_id": 0, "process_group": ["tp", "tensor"], "profiling_name": "gloo:all_reduce"}
    entry |= {"state": "scheduled", "is_p2p": False}
    record = {
        "pg_status": {"0": {"last_completed_collective": "3", "last_enqueued_collective": "5"}},
        "entries": [{**entry, "collective_seq_id": n, "retired": n <= 3} for n in range(1, 6)],
    }
    assert pending_in(record) == ([Pending("tp", "all_reduce", 4)], {"tp": 5})
    assert pending_in(json.loads("{}")) == ([], {})


def test_a_thread_in_a_call_is_found_and_an_idle_process_is_not_busy() -> None:
    entered, leave = threading.Event(), threading.Event()

    def call() -> None:
        entered.set()
        leave.wait(30)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert entered.wait(30)
        here = standing_here("this", __file__, deep=True)
        assert [place.function for place in here.places if place.file == __file__] == ["call"]
        assert here.threads and f"in {here.places[-1].function}" in here.text()
    finally:
        leave.set()
        thread.join()
    assert standing_here("this", "/no/such/file.py").places == ()


def test_a_stopped_process_is_read_without_continuing_it(tmp_path: Path) -> None:
    """Absolute: the line is that of the program's own file, counted by hand."""
    program = tmp_path / "stops.py"
    program.write_text("import os, signal\n\ndef deep():\n    os.kill(os.getpid(), signal.SIGSTOP)\n\ndeep()\n")
    child = subprocess.Popen([sys.executable, "-S", str(program)])
    try:
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        standing = standing_of(child.pid, "the child")
        assert standing.state == "T" and standing.is_stopped
        if standing.unread.startswith("py-spy cannot read it"):
            pytest.skip(standing.unread)  # the kernel forbids it (ptrace_scope)
        assert standing.line == f"{program}:4 in deep", standing.text()
        assert standing_of(child.pid, "the child").state == "T"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    gone = standing_of(child.pid, "the child")
    assert gone.places == () and gone.unread
