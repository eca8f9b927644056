"""Checkpoints commit together or not at all, and every alteration is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.core.errors import CheckpointError
from slime.training.state.checkpoint import LATEST, Checkpoint, begin, commit, latest, verify


def _write(root: Path, rollout_id: int, content: str = "weights") -> Path:
    parts = begin(root, rollout_id)
    (parts / "rank_00000.safetensors").write_text(content)
    (parts / "buffer").mkdir()
    (parts / "buffer" / "state.json").write_text(f'{{"cursor": {rollout_id}}}')
    return commit(parts, rollout_id)


def test_latest_is_the_last_committed(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None
    _write(tmp_path, 3)
    path = _write(tmp_path, 7)
    assert latest(tmp_path) == Checkpoint(path, 7)
    assert latest(path) == Checkpoint(path, 7), "a checkpoint itself can be named"
    verify(path)


def test_a_crash_before_commit_leaves_the_previous_one(tmp_path: Path) -> None:
    path = _write(tmp_path, 3)
    parts = begin(tmp_path, 4)
    (parts / "rank_00000.safetensors").write_text("half")
    assert latest(tmp_path) == Checkpoint(path, 3)
    assert list(begin(tmp_path, 4).iterdir()) == [], "remains of a crash are removed"


def test_a_crash_between_rename_and_latest_finds_the_complete_folder(tmp_path: Path) -> None:
    _write(tmp_path, 3)
    before = (tmp_path / LATEST).read_text()
    path = _write(tmp_path, 4)
    (tmp_path / LATEST).unlink()
    assert latest(tmp_path) == Checkpoint(path, 4)
    (tmp_path / LATEST).write_text(before)
    found = latest(tmp_path)
    assert found is not None
    verify(found.path)


def test_a_step_can_be_written_again(tmp_path: Path) -> None:
    _write(tmp_path, 3, "old")
    path = _write(tmp_path, 3, "new")
    assert (path / "rank_00000.safetensors").read_text() == "new"
    verify(path)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("damage", ["altered", "missing", "added", "shortened"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    path = _write(tmp_path, 3)
    file = path / "buffer" / "state.json"
    if damage == "altered":
        file.write_text(file.read_text().replace("3", "4"))
    elif damage == "missing":
        file.unlink()
    elif damage == "shortened":
        file.write_text("")
    else:
        file = path / "stray.json"
        file.write_text("{}")
    with pytest.raises(CheckpointError, match=file.name):
        verify(path)


def test_nothing_written_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no file"):
        commit(begin(tmp_path, 1), 1)
    with pytest.raises(CheckpointError, match="no committed"):
        verify(tmp_path)


def test_latest_that_names_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / LATEST).write_text(json.dumps({"path": "step_000009", "rollout_id": 9}))
    with pytest.raises(CheckpointError, match="step_000009"):
        latest(tmp_path)
