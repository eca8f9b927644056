"""Calls through the folder: what an agent does, what it refuses, and who is told when nobody answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from slime.core.errors import DeadlineExceeded, EngineError, SlimeError
from slime.core.layout import EngineLayout
from slime.serving.folder_control import FolderEngineControl
from slime.weights.delta.mailbox import call, mailbox
from tests.support.delta_rig import URL, Rig
from tests.support.weight_agents import FileEngine, agent_beside
from tests.support.weights import model


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(tmp_path, stack)


def test_without_an_agent_the_trainer_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"got no weights agent.*start `slime weights-agent`"):
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
    with pytest.raises(EngineError, match="which is none of apply"):
        call(mailbox(rig.folder, URL), method, {"model_path": "/tmp"}, limit_s=20)


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
