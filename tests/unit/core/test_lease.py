"""Law: one run at a time writes into a folder; who is dead or silent loses it, and knows before it writes again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slime.core import lease
from slime.core.errors import CheckpointError, ConfigError
from slime.core.lease import FILE_NAME, Lease
from slime.training.state import checkpoint

OWNER = """
import sys, time
from pathlib import Path
from slime.core import lease
lease.BEAT_S = 0.05
with lease.Lease(Path(sys.argv[1]), "other", flag="--save"):
    print("has it", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path) -> subprocess.Popen[str]:
    """Another run, which has the folder."""
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "has it\n"
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_LOOK_S", 0.01)


def test_a_living_run_keeps_its_folder(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    with pytest.raises(ConfigError, match=rf"run other \(process {other.pid} on .*choose another folder"):
        Lease(tmp_path, "mine", flag="--save").__enter__()


def test_a_dead_one_has_none(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.kill()
    other.wait()
    with Lease(tmp_path, "mine", flag="--save"):  # at once: it would wait a minute for a silent one
        assert json.loads((tmp_path / FILE_NAME).read_text())["run_id"] == "mine"
    assert not (tmp_path / FILE_NAME).exists()


def test_a_silent_one_loses_it_and_writes_nothing_more(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "SILENCE_S", 0.3)
    os.kill(other.pid, signal.SIGSTOP)
    with Lease(tmp_path, "mine", flag="--save"):
        os.kill(other.pid, signal.SIGCONT)
        os.sched_yield()
        mine = json.loads((tmp_path / FILE_NAME).read_text())
        assert mine["run_id"] == "mine"
        other.terminate()
        other.wait()
        assert json.loads((tmp_path / FILE_NAME).read_text())["token"] == mine["token"]


def test_who_has_lost_it_neither_begins_nor_commits(tmp_path: Path) -> None:
    """A partitioned driver that goes on beside its successor would remove what that one is writing."""
    with Lease(tmp_path, "mine", flag="--save"):
        parts = checkpoint.begin(tmp_path, 1)
        (parts / "part").write_text("x")
        mine = json.loads((tmp_path / FILE_NAME).read_text())
        (tmp_path / FILE_NAME).write_text(
            json.dumps({**mine, "token": "t", "run_id": "next", "pid": 1, "host": "elsewhere"})
        )
        for write in (lambda: checkpoint.begin(tmp_path, 2), lambda: checkpoint.commit(parts, 1)):
            with pytest.raises(CheckpointError, match=r"belongs to run next \(process 1 on elsewhere\)"):
                write()
    assert (tmp_path / FILE_NAME).exists(), "it is not the loser's to remove"


@pytest.mark.parametrize("left", ["", "[1]", '{"token": "t"}', "pipe", "/dev/zero"])
def test_a_file_that_names_no_owner_is_taken_over(tmp_path: Path, left: str) -> None:
    """A host that lost its power leaves an empty one: a run waited for ever for somebody to remove it."""
    if left == "pipe":
        os.mkfifo(tmp_path / FILE_NAME)
    elif left == "/dev/zero":
        (tmp_path / FILE_NAME).symlink_to(left)
    else:
        (tmp_path / FILE_NAME).write_text(left)
    with Lease(tmp_path, "mine", flag="--save"):
        assert json.loads((tmp_path / FILE_NAME).read_text())["run_id"] == "mine"


@pytest.mark.parametrize("folder", ["/proc/nope", "/dev/null/save"])
def test_a_folder_that_cannot_be_written_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=rf"--save {folder} is not writable .*choose another folder"):
        Lease(Path(folder), "mine", flag="--save").__enter__()
