"""What is damaged or belongs to another model is refused by name, and nothing of it is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.core.errors import CheckpointError
from slime.training.state import checkpoint
from slime.training.state.shards import MASTER, ShardReader, open_checkpoint
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch

Make = Callable[..., Any]
RANK = "rank_00000.safetensors"


def _save(backend: Any, root: Path, rollout_id: int) -> Path:
    parts = checkpoint.begin(root, rollout_id)
    return checkpoint.commit(parts, rollout_id, backend.save(parts))


def _truncate(path: Path) -> Path:
    file = path / RANK
    file.write_bytes(file.read_bytes()[:-100])
    return file


def _flip(path: Path) -> Path:
    file = path / RANK
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file


def _lose_meta(path: Path) -> Path:
    file = path / "rank_00000.json"
    file.unlink()
    return file


def _lose_config(path: Path) -> Path:
    file = path / "hf" / "config.json"
    file.unlink()
    return file


@pytest.mark.parametrize("damage", [_truncate, _flip, _lose_meta, _lose_config])
def test_damage_is_refused_and_the_checkpoint_before_it_offered(
    damage: Callable[[Path], Path], make_backend: Make, tmp_path: Path
) -> None:
    """Law: the message says which file is wrong and how to load the newest one that is whole; that one loads."""
    backend = make_backend(write_tiny_model(tmp_path / "model", "qwen3", tied=True))
    good = _save(backend, tmp_path / "save", 1)
    file = damage(_save(backend, tmp_path / "save", 2))
    found = checkpoint.find(tmp_path / "save")
    assert found is not None
    assert found.rollout_id == 2
    with pytest.raises(CheckpointError, match=file.name) as error:
        checkpoint.verify(found.path)
    assert f"{good}: --load {tmp_path / 'save'} --ckpt-step 1" in str(error.value)
    older = checkpoint.find(tmp_path / "save", 1)
    assert older is not None
    checkpoint.verify(older.path)
    backend.load(older.path)
    if damage is _truncate:  # noticed without the hashes, too
        with pytest.raises(CheckpointError, match=RANK):
            backend.load(found.path)


def test_another_model_is_refused_by_what_differs(make_backend: Make, tmp_path: Path) -> None:
    """Law: the file and the settings that differ are named, and no weight has changed."""
    models = [write_tiny_model(tmp_path / family, family, tied=True) for family in ("qwen3", "llama")]
    config = models[0] / "config.json"
    _save(make_backend(models[0]), tmp_path / "save", 0)
    for other, odd in ((models[1], "model_type qwen3 instead of llama"), (models[0], "rms_norm_eps")):
        if other == models[0]:
            config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 0.25}))
        backend = make_backend(other)
        before = {name: t.clone() for name, t in backend.iter_hf_tensors()}
        with pytest.raises(CheckpointError, match=rf"hf/config.json describes a different model from .*{odd}"):
            backend.load(tmp_path / "save" / "step_000000")
        assert all(torch.equal(t, before[name]) for name, t in backend.iter_hf_tensors())


def test_other_settings_are_refused_before_anything_changes(make_backend: Make, tmp_path: Path) -> None:
    """Law: another dtype, moments that are not there, ranks that are missing."""
    model = write_tiny_model(tmp_path / "model", "qwen3", tied=True)
    backend = make_backend(model)
    backend.save(tmp_path / "fresh")
    backend.train(random_batch())
    backend.save(tmp_path / "trained")
    backend = make_backend(model, megatron={"bf16": True})
    with pytest.raises(CheckpointError, match=r"torch.float32.*the model has torch.bfloat16"):
        backend.load(tmp_path / "trained")
    with pytest.raises(CheckpointError, match=r"rank_\*.json is missing"):
        backend.load(tmp_path / "absent")
    meta = json.loads((tmp_path / "trained" / "rank_00000.json").read_text())
    meta["layout"]["world_size"] = 2
    (tmp_path / "trained" / "rank_00000.json").write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match=r"1 ranks instead of 2.*rank_00001.json"):
        backend.load(tmp_path / "trained")
    meta["format"] = 2
    (tmp_path / "trained" / "rank_00000.json").write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match="format 2"):
        backend.load(tmp_path / "trained")


def test_a_snapshot_is_of_its_moment_and_says_by_itself_what_it_is(make_backend: Make, tmp_path: Path) -> None:
    """Law: training goes on while a snapshot is written; the folder needs neither ranks nor --hf-checkpoint."""
    model = write_tiny_model(tmp_path / "model", "qwen3", tied=False)
    backend = make_backend(model, megatron={"bf16": True})
    backend.train(random_batch())
    then = {name: t.clone() for name, t in backend.iter_hf_tensors()}
    snapshot = backend.snapshot()
    backend.save(tmp_path / "at_once")
    backend.train(random_batch(seed=1))
    parts = checkpoint.begin(tmp_path / "save", 1)
    checkpoint.verify(checkpoint.commit(parts, 1, snapshot.write(parts)))
    path = tmp_path / "save" / "step_000001"
    assert (path / RANK).read_bytes() == (tmp_path / "at_once" / RANK).read_bytes()
    with open_checkpoint(tmp_path / "save") as opened:
        assert opened.hf_config["model_type"] == "qwen3"
        assert (opened.assets / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
        weights = dict(opened.iter_hf())
        masters = dict(opened.iter_hf(MASTER))
    assert weights.keys() == then.keys() == masters.keys()
    for name, tensor in then.items():
        assert torch.equal(weights[name], tensor), name
        assert masters[name].dtype == torch.float32, name
        assert torch.equal(masters[name].bfloat16(), tensor), name


def test_a_range_that_nobody_wrote_is_an_error(make_backend: Make, tmp_path: Path) -> None:
    """Law: never zeros."""
    make_backend(write_tiny_model(tmp_path / "model", "qwen3", tied=True)).save(tmp_path / "save")
    file = tmp_path / "save" / "rank_00000.json"
    meta = json.loads(file.read_text())
    first = meta["pieces"][0]
    first[6] -= 5  # it ends earlier
    file.write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match="is incomplete"):
        ShardReader(tmp_path / "save").shard(first[0], first[1], 0)
