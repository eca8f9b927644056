"""A checkpoint converts to what the trainer that wrote it would export, without that trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.cli.main import main
from slime.training.state import checkpoint
from tests.support.families import write_family
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch


def _save(backend: Any, root: Path, rollout_id: int) -> Path:
    parts = checkpoint.begin(root, rollout_id)
    return checkpoint.commit(parts, rollout_id, backend.save(parts))


def _converted(source: Path, target: Path, *more: str) -> dict[str, torch.Tensor]:
    assert main(["convert", str(source), str(target), *more]) == 0
    return load_file(target / "model.safetensors")


def test_a_save_folder_or_one_checkpoint_of_it(tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    backend = make_backend(write_tiny_model(tmp_path / "m", "qwen3", tied=True), megatron={"bf16": True})
    exports, folders = [], []
    for step in range(2):
        backend.train(random_batch())
        exports.append({name: t.clone() for name, t in backend.iter_hf_tensors()})
        folders.append(_save(backend, tmp_path / "save", step))
    for source, want in ((tmp_path / "save", exports[1]), (folders[0], exports[0])):
        got = _converted(source, tmp_path / f"out_{source.name}")
        assert got.keys() == want.keys()
        assert all(got[n].dtype == torch.bfloat16 and torch.equal(got[n], want[n]) for n in want)
    masters = _converted(tmp_path / "save", tmp_path / "out_fp32", "--to", "fp32")
    assert all(torch.equal(masters[n].bfloat16(), want) for n, want in exports[1].items())
    assert any(not torch.equal(masters[n], want.float()) for n, want in exports[1].items()), "masters have more bits"


def test_what_training_does_not_hold_comes_from_the_source(
    tmp_path: Path, make_backend: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_family(tmp_path / "m", "qwen3_next")
    file = source / "model.safetensors"
    more = {"mtp.fc.weight": torch.randn(64, 128).bfloat16(), "mtp.norm.weight": torch.randn(64)}
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    backend = make_backend(source)
    _save(backend, tmp_path / "save", 0)
    assert main(["convert", str(tmp_path / "save"), str(tmp_path / "out")]) == 2
    assert "--hf-checkpoint" in capsys.readouterr().err
    got = _converted(tmp_path / "save", tmp_path / "out", "--hf-checkpoint", str(source))
    backend.save_hf(tmp_path / "export")
    for written in (got, load_file(tmp_path / "export" / "model.safetensors")):
        want = load_file(file)
        assert written.keys() == want.keys()
        assert all(written[n].dtype == want[n].dtype and torch.equal(written[n], want[n]) for n in want)
