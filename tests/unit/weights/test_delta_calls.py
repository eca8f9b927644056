"""Calls through the folder: what an agent does, what it refuses, and who is told when nobody answers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from slime.core.errors import DeadlineExceeded, EngineError, SlimeError
from slime.core.topology import EngineLayout
from slime.serving.control import FolderEngineControl
from slime.weights.delta.mailbox import call, mailbox
from tests.support.delta_rig import URL, Rig
from tests.support.weight_agents import FileEngine, agent_beside
from tests.support.weights import model


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(tmp_path, stack)


def test_without_an_agent_the_trainer_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no weights agent appeared.*start `slime weights-agent`"):
        call(mailbox(tmp_path, URL), "pause", {"mode": "abort"}, limit_s=0.2)


def test_an_agent_that_does_not_answer_is_named_and_the_call_is_taken_back(tmp_path: Path) -> None:
    box = mailbox(tmp_path, URL)
    box.mkdir(parents=True)
    (box / "agent.json").write_text('{"doing": "applying version 7"}')
    with pytest.raises(DeadlineExceeded, match=r"127.0.0.1_30000 to apply; last progress: applying version 7"):
        call(box, "apply", {}, limit_s=0.2)
    assert not (box / "call.json").exists()


@pytest.mark.parametrize("method", ["__init__", "local", "run", "update_weights_from_disk"])
def test_an_agent_knows_its_own_methods_alone(rig: Rig, method: str) -> None:
    with pytest.raises(EngineError, match="supported: apply"):
        call(mailbox(rig.folder, URL), method, {"model_path": "/tmp"}, limit_s=20)


LIMIT_S = 60.0


def left_behind(box: Path, method: str, arguments: dict[str, Any]) -> None:
    """A call of a trainer that was killed while it waited, longer ago than it would have."""
    program = "import json, sys; from pathlib import Path; from slime.weights.delta.mailbox import call; "
    program += "call(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), limit_s=float(sys.argv[4]))"
    words = [sys.executable, "-c", program, str(box), method, json.dumps(arguments), str(LIMIT_S)]
    trainer = subprocess.Popen(words)
    while not (box / "call.json").exists():
        assert trainer.poll() is None, "the trainer ended"
        time.sleep(0.01)
    trainer.kill()
    trainer.wait()
    asked = json.loads((box / "call.json").read_text())
    (box / "call.json").write_text(json.dumps({**asked, "until": asked["until"] - 2 * LIMIT_S}))


@pytest.mark.parametrize("method", ["apply", "resume"])
def test_an_agent_that_comes_late_does_nothing_for_a_trainer_that_is_gone(tmp_path: Path, method: str) -> None:
    """Law: what somebody has let serve meanwhile goes on with the weights that it has."""
    with ExitStack() as stack:
        rig = Rig(tmp_path, stack)
        rig.sync(1)
        digest = rig.manifest(1).digest
    box, engine = mailbox(rig.folder, URL), rig.engines[0]
    left_behind(box, method, {"version": 1, "digest": digest} if method == "apply" else {})
    engine.log.clear()
    with agent_beside(cast(Any, engine), rig.folder, tmp_path / "late") as agent:
        assert agent.answer_one() is False
    assert engine.log == []


def test_an_engine_is_paused_before_it_loads_whoever_asked(rig: Rig) -> None:
    """Law: a call that was left behind can stop an engine; it cannot have it serve what nobody has compared."""
    rig.sync(1)
    engine = rig.engines[0]
    engine.log.clear()
    call(mailbox(rig.folder, URL), "apply", {"version": 1, "digest": rig.manifest(1).digest}, limit_s=20)
    assert engine.log == ["pause", "load 1"]


def test_an_engine_that_is_lost_is_not_waited_for(tmp_path: Path) -> None:
    box = mailbox(tmp_path, URL)
    box.mkdir(parents=True)
    (box / "agent.json").write_text("{}")
    lost = threading.Event()
    threading.Timer(0.2, lost.set).start()
    with pytest.raises(SlimeError, match="was lost"):
        call(box, "apply", {}, limit_s=60, is_lost=lost.is_set)


def test_digests_of_several_ranks_come_through_the_folder(tmp_path: Path) -> None:
    table, state = model()
    engine = FileEngine(URL, table, EngineLayout(tp_size=2))
    engine.loaded = dict(state)
    with agent_beside(cast(Any, engine), tmp_path, tmp_path / "local"):
        control = FolderEngineControl(tmp_path, URL, engine.layout, 20)
        assert control.weight_checksums() == engine.weight_checksums()
