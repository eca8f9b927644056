"""What an export may take the place of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.core.errors import CheckpointError
from slime.training.state.hf_files import EXPORT_MARKER, begin_export, commit_export, require_replaceable, write_hf


def _export(directory: Path, source: Path) -> None:
    partial = begin_export(directory)
    write_hf(partial, iter([("w", torch.ones(2))]), assets_from=source)
    commit_export(partial, directory)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_an_export_takes_the_place_of_nothing_an_empty_folder_or_an_export(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "deep" / "export"
    target.mkdir(parents=True)
    for _ in range(2):
        _export(target, source)
    assert {p.name for p in target.iterdir()} == {"config.json", "model.safetensors", EXPORT_MARKER}


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_anything_else_is_named_and_left_alone(kind: str, tmp_path: Path, source: Path) -> None:
    target = tmp_path / "mine"
    if kind == "file":
        target.write_text("notes")
    elif kind == "link":
        target.symlink_to(source)
    else:
        target.mkdir()
        (target / "notes").write_text("notes")
    with pytest.raises(CheckpointError, match="mine"):
        require_replaceable(target)
    with pytest.raises(CheckpointError, match="mine"):
        _export(target, source)
    kept = {"folder": target / "notes", "file": target, "link": source / "config.json"}[kind]
    assert kept.is_file() and not (tmp_path / "mine.writing").exists()


def test_what_a_crash_left_is_removed_and_what_a_user_has_there_is_not(tmp_path: Path, source: Path) -> None:
    (begin_export(tmp_path / "export") / "part-00007.safetensors").write_text("half")
    _export(tmp_path / "export", source)
    assert not (tmp_path / "export" / "part-00007.safetensors").exists()
    beside = tmp_path / "export.writing"
    beside.mkdir()
    (beside / "notes").write_text("notes")
    with pytest.raises(CheckpointError, match=r"export\.writing"):
        _export(tmp_path / "export", source)


def test_the_mark_of_an_export_is_not_copied_as_an_asset(tmp_path: Path, source: Path) -> None:
    _export(tmp_path / "export", source)
    write_hf(tmp_path / "plain", iter([("w", torch.ones(2))]), assets_from=tmp_path / "export")
    assert not (tmp_path / "plain" / EXPORT_MARKER).exists()
