"""What an export may take the place of, what it carries along, and what a reader refuses by name."""

from __future__ import annotations

import json
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slime.core.errors import CheckpointError, ConfigError
from slime.training.state import hf_files
from slime.training.state.hf_files import (
    EXPORT_MARKER,
    HfReader,
    Writers,
    begin_export,
    commit_export,
    require_replaceable,
    write_hf,
)
from slime.weights.quantised.formats import dequantise, quantise


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
    (tmp_path / "export").rename(tmp_path / "export.replaced")  # killed before the new one got the name
    _export(tmp_path / "export", source)
    assert not (tmp_path / "export.replaced").exists()
    beside = tmp_path / "export.writing"
    beside.mkdir()
    (beside / "notes").write_text("notes")
    with pytest.raises(CheckpointError, match=r"export\.writing"):
        _export(tmp_path / "export", source)


def test_the_mark_of_an_export_is_not_copied_as_an_asset(tmp_path: Path, source: Path) -> None:
    _export(tmp_path / "export", source)
    write_hf(tmp_path / "plain", iter([("w", torch.ones(2))]), assets_from=tmp_path / "export")
    assert not (tmp_path / "plain" / EXPORT_MARKER).exists()


def test_what_training_does_not_hold_is_carried_along_unchanged(tmp_path: Path, source: Path) -> None:
    held = {"mtp.a": torch.randn(3, 4), "mtp.b": torch.randn(2).half(), "w": torch.zeros(2), "ids": torch.arange(3)}
    save_file(held, source / "model.safetensors")
    tensors = iter([("w", torch.ones(64, 2, dtype=torch.bfloat16))])
    write_hf(tmp_path / "out", tensors, assets_from=source, carried=lambda name: name.startswith("mtp."))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == {"w", "mtp.a", "mtp.b"} and written["w"].dtype == torch.bfloat16
    for name in ("mtp.a", "mtp.b"):
        assert written[name].dtype == held[name].dtype and torch.equal(written[name], held[name])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_an_export_of_an_fp8_model_is_none(tmp_path: Path, source: Path) -> None:
    """Its config no longer says so, and what is carried along is dequantised."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [4, 8]}
    config = {"dtype": "float16", "quantization_config": fp8, "text_config": {"dtype": "float16"}}
    (source / "config.json").write_text(json.dumps(config))
    codes, scale = quantise(torch.randn(9, 10), (4, 8))
    save_file({"mtp.weight": codes, "mtp.weight_scale_inv": scale}, source / "model.safetensors")
    write_hf(tmp_path / "out", [("w", torch.ones(64, 8))], assets_from=source, carried=lambda n: n[:3] == "mtp")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == {"w", "mtp.weight"}
    assert torch.equal(written["mtp.weight"], dequantise(codes, scale, (4, 8)).half())
    left = json.loads((tmp_path / "out" / "config.json").read_text())
    assert left == {"dtype": "float32", "text_config": {"dtype": "float32"}}


def test_a_tensor_is_a_view_of_its_file_that_outlives_a_release_and_the_reader(source: Path) -> None:
    held = {"a": torch.randn(300, 70), "b": torch.arange(5, dtype=torch.uint8), "c": torch.zeros(0, 3)}
    save_file(held, source / "model.safetensors")
    with HfReader(source) as read:
        got = {name: read(name) for name in read.names}
        assert torch.equal(got["a"][7], held["a"][7])
        read.release()
    assert got.keys() == held.keys() and all(torch.equal(got[n], held[n]) for n in held)


def test_an_empty_tensor_may_stand_anywhere_in_the_header(source: Path) -> None:
    spans = {"full": ([2], [0, 8]), "empty": ([0], [0, 0])}
    header = json.dumps({n: {"dtype": "F32", "shape": s, "data_offsets": at} for n, (s, at) in spans.items()}).encode()
    (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with HfReader(source) as read:
        assert read("empty").shape == (0,) and torch.equal(read("full"), torch.zeros(2))


@pytest.mark.parametrize("damage", ["cut", "longer", "header", "empty", "gone", "index", "elsewhere", "away"])
def test_a_damaged_file_is_named(damage: str, source: Path) -> None:
    file, index = source / "model-00001-of-00001.safetensors", source / "model.safetensors.index.json"
    save_file({"w": torch.randn(40)}, file)
    index.write_text(json.dumps({"weight_map": {"w": file.name}}))
    whole = file.read_bytes()
    if damage in ("cut", "longer", "header", "empty"):
        changed = {"cut": whole[:-1], "longer": whole + b"0", "header": b"\xff" * 20 + whole[20:], "empty": b""}
        file.write_bytes(changed[damage])
    elif damage == "gone":
        file.unlink()
    elif damage == "index":
        index.write_text("{")
    else:
        index.write_text(json.dumps({"weight_map": {"v": file.name} if damage == "elsewhere" else {"w": "../x"}}))
    named = index.name if damage in ("index", "away") else file.name
    with pytest.raises(CheckpointError, match=named), HfReader(source) as read:
        for name in read.names:
            read(name)


def test_codes_without_scales_are_no_weights(source: Path) -> None:
    codes, scale = quantise(torch.randn(200, 200))
    file = source / "model.safetensors"
    config = source / "config.json"
    save_file({"w": codes, "w_scale_inv": scale}, file)
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        HfReader(source)("w")
    config.write_text(json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors, w: .*weight_block_size"):
        HfReader(source)("w")
    save_file({"w": codes}, file)
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        HfReader(source)("w")
    config.write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match="gptq"):
        HfReader(source)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12), num_writers=st.integers(1, 4))
def test_who_writes_a_file_cannot_be_seen(sizes: list[int], num_writers: int) -> None:
    """Law: several writers, each of which writes some files, leave what one writer leaves, byte for byte."""
    tensors = [(f"w{i}", torch.full((size,), i, dtype=torch.float32)) for i, size in enumerate(sizes)]
    with (
        tempfile.TemporaryDirectory() as temporary,
        pytest.MonkeyPatch.context() as patch,
        ThreadPoolExecutor(num_writers) as pool,
    ):
        patch.setattr(hf_files, "MAX_SHARD_BYTES", 100)
        source, alone, together = (Path(temporary, name) for name in ("source", "alone", "together"))
        source.mkdir()
        (source / "config.json").write_text("{}")
        write_hf(alone, tensors, assets_from=source)
        together.mkdir()
        barrier = threading.Barrier(num_writers)

        def meet() -> None:
            barrier.wait(60)

        written = [
            pool.submit(
                write_hf,
                together,
                iter(tensors),
                assets_from=source,
                writers=Writers(rank, num_writers, meet),
            )
            for rank in range(num_writers)
        ]
        assert all(one.result(60) is None for one in written)
        files = [{f.name: f.read_bytes() for f in folder.iterdir()} for folder in (alone, together)]
        assert files[0] == files[1]
        if sum(sizes) * 4 > 100 and len(sizes) > 1:
            assert len(files[0]) > 3, "several files, or nothing is tested"
