"""`slime convert`: the same tensors in another type, in a folder that is complete or not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from slime.cli.main import main
from slime.training.state import hf_files
from slime.training.state.hf_files import HfReader
from slime.weights.quantised.formats import BLOCK
from tests.support.families import write_family
from tests.support.tiny import write_tiny_model

SHAPE = {"hidden_size": 160, "intermediate_size": 200, "num_hidden_layers": 2}
"""Blocks of 128 x 128, whole and cut."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("m") / "qwen3", "qwen3", **SHAPE)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("m") / "moe", "qwen3_moe", hidden_size=160)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    bytes_of = [{n: t.contiguous().view(torch.uint8) for n, t in side.items()} for side in (left, right)]
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(b, bytes_of[1][n]) for n, b in bytes_of[0].items()
    )


def _config(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    return config


def test_without_a_type_it_is_a_copy(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_files, "MAX_SHARD_BYTES", 300_000)  # several files and an index
    (tmp_path / "out").mkdir()
    assert main(["convert", str(dense), str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert _same(_tensors(dense), _tensors(tmp_path / "out"))
    assert _config(dense) == _config(tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").encode("a+b")


def test_it_says_what_it_wrote_and_others_may_read_it(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: files, tensors, types and size are printed; the mode of a file is what the umask leaves."""
    assert main(["convert", str(dense), str(tmp_path / "out"), "--to", "bf16"]) == 0
    num_tensors, told = len(_tensors(dense)), capsys.readouterr().out
    assert f"wrote {tmp_path / 'out'}: {num_tensors} tensors" in told
    assert f"  model.safetensors: {num_tensors} bfloat16, " in told and "config.json" in told
    (tmp_path / "ordinary").touch()
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert set(modes.values()) == {(tmp_path / "ordinary").stat().st_mode}, modes


@pytest.mark.parametrize(("to", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)])
def test_to_another_type(to: str, dtype: torch.dtype, dense: Path, tmp_path: Path) -> None:
    assert main(["convert", str(dense), str(tmp_path / "out"), "--to", to]) == 0
    assert _same({n: t.to(dtype) for n, t in _tensors(dense).items()}, _tensors(tmp_path / "out"))
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == dtype


@pytest.mark.parametrize("family", ["dense", "experts"])
def test_fp8_there_and_back(family: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source, out = request.getfixturevalue(family), tmp_path / "fp8"
    assert main(["convert", str(source), str(out), "--to", "fp8"]) == 0
    plain, coded = _tensors(source), _tensors(out)
    scales = {n for n in coded if n.endswith("_scale_inv")}
    assert coded.keys() - scales == plain.keys()
    for name, tensor in plain.items():
        linear = any(part in name for part in ("_proj.",))
        assert (name + "_scale_inv" in scales) == (coded[name].dtype == torch.float8_e4m3fn) == linear, name
        assert linear or torch.equal(coded[name], tensor)
    quantization = _config(out)["quantization_config"]
    assert isinstance(quantization, dict)
    kept = set(quantization.pop("modules_to_not_convert"))
    assert quantization == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
    }
    routers = {n.removesuffix(".weight") for n in plain if n.endswith("mlp.gate.weight")}
    assert kept == {"model.embed_tokens", "lm_head", *routers}
    with HfReader(out) as read:
        assert set(read.names) == set(plain)
        for name, tensor in plain.items():
            assert (read(name) - tensor).abs().max() <= tensor.abs().max() / 16, name
    # The codes and the scales survive the way through float32.
    assert main(["convert", str(out), str(tmp_path / "fp32"), "--to", "fp32"]) == 0
    assert "quantization_config" not in _config(tmp_path / "fp32")
    assert main(["convert", str(tmp_path / "fp32"), str(tmp_path / "again"), "--to", "fp8"]) == 0
    assert _same(coded, _tensors(tmp_path / "again"))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_transformers_reads_the_fp8_files_as_we_do(family: str, tmp_path: Path) -> None:
    """Where blocks are whole: it takes the rows of a block to be rows / scales (transformers 5.12)."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "head_dim": 64}
    write_tiny_model(tmp_path / "plain", family, **sizes)
    for source, to in (("plain", "fp8"), ("fp8", "bf16")):
        assert main(["convert", str(tmp_path / source), str(tmp_path / to), "--to", to]) == 0
    tokens = torch.arange(6, 40)[None]
    log_probs, weights = {}, {}
    for name in ("plain", "fp8", "bf16"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        weights[name] = model.state_dict()
        log_probs[name] = model(tokens).logits.float().log_softmax(-1)
    for name, weight in weights["fp8"].items():  # on a CPU it dequantises, to bfloat16 or to the model's type
        assert (weight - weights["bf16"][name]).abs().max() <= weight.abs().max() / 256, name
    assert (log_probs["fp8"] - log_probs["bf16"]).abs().max() < 0.02
    assert (log_probs["fp8"] - log_probs["plain"]).abs().mean() < 0.05


def test_what_is_there_is_left_alone(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(dense), str(out)]) == 0
    assert main(["convert", str(dense), str(out)]) == 2, "not even an earlier export is replaced"
    assert "not empty" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nothing"), str(tmp_path / "other")]) == 2


def test_fp8_of_fp8_is_refused(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(dense), str(tmp_path / "fp8"), "--to", "fp8"]) == 0
    assert main(["convert", str(tmp_path / "fp8"), str(tmp_path / "out"), "--to", "fp8"]) == 2
    assert "already FP8" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["fp8", "torch_dist"])
def test_experts_in_an_order_that_a_format_does_not_have_are_refused(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_family(tmp_path / "model", "gpt_oss")
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "out"), "--to", to]) == 2
    assert "interleaved gates and values" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_damaged_file_leaves_nothing_and_is_named(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(dense), str(tmp_path / "copy")]) == 0
    file = tmp_path / "copy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["convert", str(tmp_path / "copy"), str(tmp_path / "out")]) == 2
    assert str(file) in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_missing_tensor_is_named(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(dense), str(tmp_path / "copy")]) == 0
    tensors = _tensors(tmp_path / "copy")
    del tensors["model.norm.weight"]
    hf_files.save_file(tensors, tmp_path / "copy" / "model.safetensors")
    assert main(["convert", str(tmp_path / "copy"), str(tmp_path / "out")]) == 2
    assert "missing model.norm.weight" in capsys.readouterr().err


def test_neither_engines_nor_megatron_are_imported() -> None:
    code = (
        "import sys, slime.cli.checkpoint_conversion, slime.training.state.hf_files, slime.training.state.shards;"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'megatron', 'sglang', 'ray', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
