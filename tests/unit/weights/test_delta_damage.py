"""Dropped, corrupted, reordered, doubled and half applied deltas: none is served, and the next weight sync heals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from slime.core.errors import EngineError, WeightSyncError
from slime.weights.delta.folder import Base, Manifest, folder_of
from slime.weights.delta.local_checkpoint import LocalCheckpoint
from slime.weights.delta.mailbox import call, mailbox
from tests.support.delta_rig import URL, Rig, flip, patch_file
from tests.support.marks import quick


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(tmp_path, stack)


def dropped(rig: Rig, folder: Path) -> None:
    shutil.rmtree(folder)


def corrupted(rig: Rig, folder: Path) -> None:
    flip(patch_file(folder), 99)


def cut_off(rig: Rig, folder: Path) -> None:
    os.truncate(patch_file(folder), patch_file(folder).stat().st_size // 2)


def without_manifest(rig: Rig, folder: Path) -> None:
    (folder / "manifest.json").unlink()


def reordered(rig: Rig, folder: Path) -> None:
    """The delta before stands in the place of this one."""
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name(folder_of(2)), folder)


def of_an_older_base(rig: Rig, folder: Path) -> None:
    found = json.loads((folder / "manifest.json").read_text())
    found["base"]["version"] -= 1
    (folder / "manifest.json").write_text(json.dumps(found))


def one_tensor_less(rig: Rig, folder: Path) -> None:
    """Its digest fits: as if a sender's report had been lost."""
    found = Manifest.read(folder)
    Manifest(found.version, found.base, found.checksum, found.whole, found.entries[1:]).write(folder)


DAMAGES = (dropped, corrupted, cut_off, without_manifest, reordered, of_an_older_base, one_tensor_less)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_delta_is_never_served_and_the_next_sync_heals(rig: Rig, damage: Callable[[Rig, Path], None]) -> None:
    """Law: the engine stays paused, at the version before, and one weight sync later it has the trainer's weights."""
    for version in (1, 2):
        rig.step(version)
        rig.sync(version)
    rig.step(3)
    context = rig.channel._context
    object.__setattr__(context, "post_write", lambda folder, engines: damage(rig, folder))
    with pytest.raises(EngineError) as caught:
        rig.sync(3)
    assert caught.value.engines == (URL,)
    assert rig.engines[0].version == 2 and rig.engines[0].log[-3:] == ["pause", "flush", "begin"]
    object.__setattr__(context, "post_write", None)
    assert rig.channel.heals
    rig.sync(3)
    assert not rig.channel.heals and rig.manifest(3).base is None
    rig.assert_served(3)


def test_any_flipped_bit_of_a_version_is_caught(rig: Rig) -> None:
    """Law: all are, in patches and in manifests; `test_delta_to_engine.py` flips a hundred."""
    rig.sync(1)
    rig.step(1)
    rig.sync(2)
    folder, target = rig.folder / "weight_v000002", Base(2, rig.manifest(2).digest)
    local = LocalCheckpoint(rig.locals / "apart", rig.folder)
    generator = torch.Generator().manual_seed(0)
    for turn in range(30):
        local.bring_to(Base(1, rig.manifest(1).digest))
        file = patch_file(folder) if turn % 2 else folder / "manifest.json"
        at = int(torch.randint(file.stat().st_size * 8, (), generator=generator))
        flip(file, at)
        with pytest.raises(WeightSyncError):
            local.bring_to(target)
        flip(file, at)
    local.bring_to(target)
    assert local.state is not None and local.state.version == 2


def test_a_call_that_is_made_twice_changes_nothing(rig: Rig) -> None:
    """Law: a version is applied once, however often it is asked for."""
    rig.sync(1)
    rig.step(1)
    rig.sync(2)
    target = {"version": 2, "digest": rig.manifest(2).digest}
    for _ in range(3):
        assert call(mailbox(rig.folder, URL), "apply", target, limit_s=20) == {"full": 0, "deltas": 0, "num_bytes": 0}
    assert torch.equal(rig.engines[0].loaded["model.norm.weight"], rig.state["model.norm.weight"])


def test_versions_that_were_missed_are_caught_up_in_order(rig: Rig) -> None:
    """Law: whichever version is asked for first, what it stands on is applied before it."""
    for version in range(1, 5):
        rig.step(version)
        rig.sync(version)
    late = LocalCheckpoint(rig.locals / "late", rig.folder)
    done = late.bring_to(Base(4, rig.manifest(4).digest))
    assert (done.full, done.deltas) == (1, 3)
    assert late.state is not None and late.state.digest == rig.manifest(4).digest
    assert late.bring_to(Base(2, rig.manifest(2).digest)).full == 1, "back is a way from the full one"


def test_a_copy_that_somebody_changed_is_made_anew(rig: Rig) -> None:
    rig.sync(1)
    rig.step(1)
    file = max((rig.locals / URL[-5:] / "model").glob("*.safetensors"), key=lambda f: f.stat().st_size)
    for at in range(10):
        flip(file, (file.stat().st_size - 2 * at - 1) * 8)
    rig.sync(2)
    rig.assert_served(2)


def test_a_copy_that_was_damaged_after_it_was_loaded_is_made_again_for_the_same_version(rig: Rig) -> None:
    """Law: a start that sends what the copy has already, whole, finds out and heals."""
    rig.sync(1)
    for file in (rig.locals / URL[-5:] / "model").glob("*.safetensors"):
        flip(file, (file.stat().st_size - 1) * 8)
    rig.begin_again()
    rig.sync(1)
    rig.assert_served(1)


KILLED_COPY = """
import os, signal, sys
from pathlib import Path
from slime.weights.delta.local_checkpoint import LocalCheckpoint
from slime.weights.delta.folder import Base, Manifest
from slime.weights.delta import local_checkpoint as local

folder, copy, version, at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
seen = 0

def here(doing):
    global seen
    seen += 1
    if seen == at:
        os.kill(os.getpid(), signal.SIGKILL)

local.MOST_THREADS = 1
digest = Manifest.read(folder / f"weight_v{version:06d}").digest
LocalCheckpoint(copy, folder, here).bring_to(Base(version, digest))
"""


@pytest.mark.parametrize("version", quick([2, 3], 3))
def test_a_copy_that_is_killed_in_mid_apply_is_never_taken_for_whole(rig: Rig, version: int) -> None:
    """Law: at whatever tensor or file; the next one to come makes a whole copy of it."""
    for number in (1, 2, 3):
        rig.step(number)
        rig.sync(number)
    whole = LocalCheckpoint(rig.locals / "whole", rig.folder)
    whole.bring_to(Base(version, rig.manifest(version).digest))
    num_notes = sum(1 + len(rig.manifest(number).entries) for number in range(2, version + 1))
    for at in (1, 2, num_notes // 2, num_notes):
        copy = rig.locals / f"killed-{at}"
        local = LocalCheckpoint(copy, rig.folder)
        local.bring_to(Base(1, rig.manifest(1).digest))
        program = [sys.executable, "-c", KILLED_COPY, str(rig.folder), str(copy), str(version), str(at)]
        assert subprocess.run(program, timeout=60).returncode == -signal.SIGKILL
        held = local.state
        assert (held is None) == (at not in (1, 1 + len(rig.manifest(2).entries) + 1)), "a torn copy has no state"
        local.bring_to(Base(version, rig.manifest(version).digest))
        for file in whole.model.iterdir():
            assert file.read_bytes() == (local.model / file.name).read_bytes()
