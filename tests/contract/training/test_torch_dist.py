"""Megatron-core's `torch_dist`: what slime writes, Megatron's own model loads; what that writes, slime reads."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from slime.cli.main import main
from tests.contract.training.torch_dist_ranks import Layout, log_probs, rewrite
from tests.support.families import FAMILIES, write_family
from tests.support.marks import quick
from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "tied": ("qwen3", {"tied": True}),
    "experts": ("qwen3_moe", {}),
}
LAYERS_APART = {"non_homogeneous_layers": True}
ALL_APART = {"singleton_local_shards": True}


class Made:
    """A tiny model in Hugging Face format, and what `slime convert --to torch_dist` made of it."""

    def __init__(self, folder: Path, shape: str) -> None:
        family, changes = SHAPES[shape]
        self.hf = write_tiny_model(folder / "hf", family, **changes)
        self.folder = folder / "torch_dist"
        assert main(["convert", str(self.hf), str(self.folder), "--to", "torch_dist"]) == 0
        self.config: dict[str, Any] = json.loads((self.hf / "config.json").read_text())

    @property
    def release(self) -> Path:
        return self.folder / "release"


class _MadeWhenAsked(dict[str, Made]):
    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, shape: str) -> Made:
        self[shape] = Made(self._factory.mktemp(shape), shape)
        return self[shape]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    return _MadeWhenAsked(tmp_path_factory)


def _read(source: Path, model: Path, out: Path, *flags: str) -> int:
    return main(["convert", str(source), str(out), "--hf-checkpoint", str(model), "--trust-pickle", *flags])


def _same(left: Path, right: Path) -> bool:
    one, other = (load_file(folder / "model.safetensors") for folder in (left, right))
    return one.keys() == other.keys() and all(
        t.dtype == other[n].dtype and torch.equal(t.view(torch.uint8), other[n].view(torch.uint8))
        for n, t in one.items()
    )


@pytest.mark.parametrize("shape", quick(SHAPES, "dense"))
def test_there_and_back_is_the_same_bits(shape: str, made: dict[str, Made], tmp_path: Path) -> None:
    """Law: HF -> `dist_checkpointing` -> HF changes no bit; config and tokenizer come along."""
    assert (made[shape].folder / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert _read(made[shape].folder, made[shape].hf, tmp_path / "out") == 0
    assert _same(made[shape].hf, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == made[shape].config
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").encode("a+b")


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])
def test_every_family_goes_there_and_back(family: str, tmp_path: Path) -> None:
    """Law: what is in a family's weight table has a place in the folder, also where Megatron has no such layer."""
    write_family(tmp_path / "hf", family)
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "torch_dist"), "--to", "torch_dist"]) == 0
    assert _read(tmp_path / "torch_dist", tmp_path / "hf", tmp_path / "out") == 0
    assert _same(tmp_path / "hf", tmp_path / "out")


def test_what_has_no_place_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_family(tmp_path / "hf", "gpt_oss")
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "torch_dist"), "--to", "torch_dist"]) == 2
    assert "choose a different --to" in capsys.readouterr().err and not (tmp_path / "torch_dist").exists()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_megatrons_own_model_computes_what_transformers_does(shape: str, made: dict[str, Made], ranks: Ranks) -> None:
    """Law: names, order of heads and halves are Megatron's: its model, loaded by it, has the model's log-probs."""
    tokens = list(range(6, 46))
    (found,) = ranks.run(log_probs, 1, made[shape].release, made[shape].config, tokens)
    model = transformers.AutoModelForCausalLM.from_pretrained(made[shape].hf, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert (found - wanted).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        pytest.param("dense", Layout(tp=2), id="two tensor-parallel ranks, layers stacked"),
        pytest.param("experts", Layout(ep=2), id="two expert-parallel ranks, layers and experts stacked"),
        pytest.param("tied", Layout(tp=2), id="tied"),
        pytest.param("dense", Layout(pp=2), id="two stages, layers stacked"),
        pytest.param("dense", Layout(pp=2, metadata=LAYERS_APART), id="two stages, layers apart"),
        pytest.param("experts", Layout(tp=2, metadata=ALL_APART), id="all apart, halves too"),
        pytest.param("experts", Layout(pp=2, te_names=False), id="names of local layers"),
    ],
)
@pytest.mark.slow
def test_what_ranks_wrote_is_read(
    shape: str, layout: Layout, made: dict[str, Made], ranks: Ranks, tmp_path: Path
) -> None:
    """Law: whatever layout and form Megatron writes, the same HF tensors come out, and its optimizer stays behind."""
    again = (made[shape].release, tmp_path / "again", made[shape].config, layout)
    children = ranks.run(rewrite, layout.world_size, *again)
    assert not any(children), f"a rank that is killed would leave {children} behind"
    assert _read(tmp_path / "again", made[shape].hf, tmp_path / "out") == 0
    assert _same(made[shape].hf, tmp_path / "out")


def test_a_conversion_leaves_no_process_of_megatrons_writer(made: dict[str, Made]) -> None:
    assert made["dense"], "this process has converted"
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("SyncManager")]


def _forget(folder: Path, name: str) -> None:
    """Takes a tensor out of what the folder says that it has."""
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    del metadata.state_dict_metadata[name]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.slow
def test_a_tensor_that_is_missing_or_too_much_is_named(
    made: dict[str, Made], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a folder of another model, or an incomplete one, is refused by names, and leaves nothing."""
    lost = _copied(made["dense"].release, tmp_path / "lost")
    _forget(lost, "decoder.layers.1.mlp.linear_fc2.weight")
    assert _read(lost, made["dense"].hf, tmp_path / "out") == 2
    assert "missing decoder.layers.1.mlp.linear_fc2.weight, unknown none" in capsys.readouterr().err
    assert _read(made["dense"].release, made["tied"].hf, tmp_path / "out") == 2
    assert "missing none, unknown output_layer.weight" in capsys.readouterr().err
    shallow = write_tiny_model(tmp_path / "shallow", "qwen3_moe", num_experts=2)
    assert _read(made["experts"].release, shallow, tmp_path / "out") == 2
    assert "unknown decoder.layers.0.mlp.experts.experts.linear_fc1.weight beyond 2" in capsys.readouterr().err
    wide = write_tiny_model(tmp_path / "wide", "qwen3", intermediate_size=192)
    assert _read(made["dense"].release, wide, tmp_path / "out") == 2
    assert "has the shape [320, 64]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_shard_that_is_damaged_or_hostile_is_named(
    made: dict[str, Made], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: tensors are read as tensors alone; a pickle in the place of one runs nothing."""
    mark, content = tmp_path / "mark", tmp_path / "content"
    torch.save({"x": _Hostile(mark)}, content)
    for name, instead, why in (
        ("hostile", content.read_bytes(), "it references posix.system, which is not part of any weight or sample"),
        ("damaged", b"nothing", "output_layer.weight in "),
    ):
        folder = _copied(made["dense"].release, tmp_path / name)
        with open(folder / ".metadata", "rb") as file:
            metadata = pickle.load(file)
        (place,) = [info for index, info in metadata.storage_data.items() if index.fqn == "output_layer.weight"]
        shard = (folder / place.relative_path).read_bytes()
        place.offset, place.length = len(shard), len(instead)
        (folder / place.relative_path).write_bytes(shard + instead)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        assert _read(folder, made["dense"].hf, tmp_path / "out") == 2
        said = capsys.readouterr().err
        assert "output_layer.weight in " in said and why in said
        assert not (tmp_path / "out").exists() and not mark.exists()


class _Hostile:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark}",)


@pytest.mark.slow
def test_another_type_is_made_on_the_way(made: dict[str, Made], tmp_path: Path) -> None:
    assert _read(made["experts"].folder, made["experts"].hf, tmp_path / "out", "--to", "bf16") == 0
    read = load_file(tmp_path / "out" / "model.safetensors")
    plain = load_file(made["experts"].hf / "model.safetensors")
    assert all(torch.equal(tensor, plain[name].bfloat16()) for name, tensor in read.items())


def test_a_model_is_needed_for_config_and_tokenizer(
    made: dict[str, Made], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(made["dense"].folder), str(tmp_path / "out"), "--trust-pickle"]) == 2
    assert "--hf-checkpoint" in capsys.readouterr().err
