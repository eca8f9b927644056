"""Checkpoints commit together or not at all, and every alteration is found."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from slime.core.errors import CheckpointError, DeadlineExceeded, DiskFull
from slime.training.state.checkpoint import (
    LATEST,
    MANIFEST,
    BackgroundSave,
    Checkpoint,
    HashedFile,
    begin,
    commit,
    find,
    latest,
    prune,
    set_aside,
    verify,
)
from slime.training.state.rank_state import RankState
from slime.training.state.shards import FORMAT, ShardReader, write_meta, write_tensors


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


def test_ranks_share_the_hashing(tmp_path: Path) -> None:
    """Law: what one would find alone, all parts find together."""
    path = _write(tmp_path, 3)
    file = path / "rank_00000.safetensors"
    file.write_text("weighty")
    found = []
    for i in range(3):
        try:
            verify(path, share=(i, 3))
        except CheckpointError as error:
            found.append(str(error))
    assert len(found) == 1 and "rank_00000.safetensors was altered" in found[0]


def test_a_crash_before_commit_leaves_the_previous_one(tmp_path: Path) -> None:
    path = _write(tmp_path, 3)
    parts = begin(tmp_path, 4)
    (parts / "rank_00000.safetensors").write_text("half")
    assert latest(tmp_path) == Checkpoint(path, 3)
    assert list(begin(tmp_path, 4).iterdir()) == [], "remains of a crash are removed"


def test_a_crash_between_rename_and_latest_keeps_the_name(tmp_path: Path) -> None:
    previous = _write(tmp_path, 3)
    before = (tmp_path / LATEST).read_text()
    path = _write(tmp_path, 4)
    (tmp_path / LATEST).write_text(before)
    assert latest(tmp_path) == Checkpoint(previous, 3), "what has been named stays named"
    (tmp_path / LATEST).unlink()  # the first commit of a folder
    assert latest(tmp_path) == Checkpoint(path, 4)


def test_a_crash_while_a_step_is_replaced_leaves_the_old_one(tmp_path: Path) -> None:
    path = _write(tmp_path, 3, "old")
    parts = begin(tmp_path, 3)
    (parts / "rank_00000.safetensors").write_text("new")
    path.rename(tmp_path / ".replaced_step_000003")  # the first of the two renames
    found = latest(tmp_path)
    assert found is not None
    verify(found.path)
    begin(tmp_path, 4)
    assert latest(tmp_path) == Checkpoint(path, 3), "the next save puts it back"
    assert (path / "rank_00000.safetensors").read_text() == "old"


def test_leftovers_are_removed_by_the_next_save(tmp_path: Path) -> None:
    _write(tmp_path, 3)
    for remains in (".writing_step_000009", ".removed_step_000001", ".replaced_step_000003"):
        (tmp_path / remains).mkdir()
        (tmp_path / remains / "rank_00000.json").write_text("{}")
    (tmp_path / ".mine").mkdir()
    parts = begin(tmp_path, 4)
    assert {p.name for p in tmp_path.iterdir()} == {"step_000003", LATEST, parts.name, ".mine"}


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "step_000003").mkdir()
    with pytest.raises(CheckpointError, match=r"step_000003 .*has no manifest"):
        begin(tmp_path, 3)


def test_a_step_can_be_written_again(tmp_path: Path) -> None:
    _write(tmp_path, 3, "old")
    path = _write(tmp_path, 3, "new")
    assert (path / "rank_00000.safetensors").read_text() == "new"
    verify(path)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("damage", ["altered", "missing", "added", "shortened", "manifest"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    path = _write(tmp_path, 3)
    file = path / "buffer" / "state.json"
    good = _write(tmp_path, 2)
    _write(tmp_path, 1)
    (tmp_path / "step_000001" / "stray").touch()  # damaged, too: not offered
    if damage == "altered":
        file.write_text(file.read_text().replace("3", "4"))
    elif damage == "missing":
        file.unlink()
    elif damage == "shortened":
        file.write_text("")
    elif damage == "manifest":
        file = path / MANIFEST
        file.write_text(file.read_text().replace('"bytes": 13', '"bytes": 14'))
    else:
        file = path / "stray.json"
        file.write_text("{}")
    with pytest.raises(CheckpointError, match=file.name) as error:
        verify(path)
    assert f"{good}: --load {tmp_path} --ckpt-step 2" in str(error.value)


def test_nothing_written_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no file"):
        commit(begin(tmp_path, 1), 1)
    with pytest.raises(CheckpointError, match="was not committed"):
        verify(tmp_path)


def test_latest_that_names_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / LATEST).write_text(json.dumps({"path": "step_000009", "rollout_id": 9}))
    with pytest.raises(CheckpointError, match="step_000009"):
        latest(tmp_path)


def test_latest_without_its_manifest_is_refused_and_the_one_before_offered(tmp_path: Path) -> None:
    _write(tmp_path, 3)
    (_write(tmp_path, 4) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=rf"step_000004.*no manifest.json.*--load {tmp_path} --ckpt-step 3"):
        latest(tmp_path)


def test_any_step_can_be_found(tmp_path: Path) -> None:
    paths = {step: _write(tmp_path, step) for step in (3, 4, 5)}
    assert find(tmp_path, 4) == Checkpoint(paths[4], 4)
    assert find(tmp_path) == Checkpoint(paths[5], 5)
    assert find(paths[4], 4) == Checkpoint(paths[4], 4)
    for root in (tmp_path, paths[4]):
        with pytest.raises(CheckpointError, match="--ckpt-step 7"):
            find(root, 7)


def test_files_sealed_while_written_are_not_read_again(tmp_path: Path) -> None:
    parts = begin(tmp_path, 1)
    with HashedFile(parts / "rank_00000.safetensors") as file:
        file.write(b"weights")
    verify(commit(parts, 1, {"rank_00000.safetensors": file.seal}))
    parts = begin(tmp_path, 2)
    (parts / "rank_00000.safetensors").write_bytes(b"weigh")
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors.*the wrong size"):
        commit(parts, 2, {"rank_00000.safetensors": file.seal})


def _steps(root: Path) -> list[int]:
    return sorted(int(p.name[-6:]) for p in root.glob("step_*"))


def test_retention_keeps_the_newest_the_retained_and_those_in_use(tmp_path: Path) -> None:
    other = tmp_path / "step_000000"  # no checkpoint of ours
    other.mkdir()
    for step in range(1, 10):
        _write(tmp_path, step)
    assert prune(tmp_path, keep_last=None, retain_interval=5) == []
    gone = prune(tmp_path, keep_last=2, retain_interval=5, keep=[tmp_path / "step_000002"])
    assert len(gone) == 5
    assert _steps(tmp_path) == [0, 2, 4, 8, 9]
    verify(tmp_path / "step_000004")


def test_retention_goes_by_the_time_of_the_commit(tmp_path: Path) -> None:
    for step in (7, 8, 3):
        _write(tmp_path, step)
    prune(tmp_path, keep_last=1)
    assert _steps(tmp_path) == [3]
    assert latest(tmp_path) == Checkpoint(tmp_path / "step_000003", 3)


def test_retention_keeps_the_branch_that_a_run_left(tmp_path: Path) -> None:
    """Law: steps later than the one resumed from are another branch's, also after a second start."""
    for step in (5, 6, 7, 9):
        _write(tmp_path, step)
    assert set_aside(tmp_path, after=5) == ["step_000006", "step_000007", "step_000009"]
    _write(tmp_path, 7)
    prune(tmp_path, keep_last=1)
    assert _steps(tmp_path) == [6, 7, 9], "5 was this branch's, and 7 is now"
    set_aside(tmp_path, after=7)
    _write(tmp_path, 10)
    _write(tmp_path, 11)
    prune(tmp_path, keep_last=2)
    assert _steps(tmp_path) == [6, 9, 10, 11]


def test_a_run_that_starts_at_its_newest_step_sets_nothing_aside(tmp_path: Path) -> None:
    _write(tmp_path, 5)
    assert set_aside(tmp_path, after=5) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step_000005"]


def test_an_error_in_the_background_is_told_once() -> None:
    background = BackgroundSave()

    def fail() -> dict[str, float]:
        raise CheckpointError("the disk is full")

    assert background.poll() == {}
    background.start(fail, what="the checkpoint of step 1")
    with pytest.raises(CheckpointError, match="the disk is full"):
        background.finish(limit_s=10)
    background.start(lambda: {"perf/save_total_time": 1.0}, what="the checkpoint of step 2")
    assert background.finish(limit_s=10) == {"perf/save_total_time": 1.0}
    assert background.finish(limit_s=10) == {}


def test_a_save_that_does_not_end_is_named() -> None:
    background, end = BackgroundSave(), threading.Event()
    background.start(lambda: {"ended": float(end.wait(10))}, what="the checkpoint of step 1")
    assert background.poll() == {}
    with pytest.raises(DeadlineExceeded, match="the checkpoint of step 1"):
        background.finish(limit_s=0.01)
    with pytest.raises(AssertionError, match="still running"):
        background.start(dict, what="the checkpoint of step 2")
    end.set()
    assert background.finish(limit_s=10) == {"ended": 1.0}


def test_a_tensor_of_a_rank_does_not_live_in_the_file(tmp_path: Path) -> None:
    """Generators keep what they are given, and retention removes the file."""
    state, file = torch.arange(9, dtype=torch.uint8), tmp_path / "rank_00000.safetensors"
    write_tensors(file, {"rng/torch": state})
    write_meta(file.with_suffix(".json"), {"format": FORMAT, "layout": {"world_size": 1}, "pieces": []})
    reader = ShardReader(tmp_path)
    kept = reader.tensor(0, "rng/torch")
    with file.open("r+b") as damaged:
        damaged.write(bytes(file.stat().st_size))
    reader.tensor(0, "rng/torch")
    assert torch.equal(kept, state)


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_a_full_disk_under_checkpoint_shards_is_named(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"rank_00000.{suffix}").symlink_to("/dev/full")
    state = RankState(0, {"w": torch.ones(4)}, {"format": FORMAT}, assets_from=None)
    with pytest.raises(DiskFull, match=f"cannot write to {tmp_path}"):
        state.write(tmp_path)
