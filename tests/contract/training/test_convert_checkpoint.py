"""A checkpoint converts to what the trainer that wrote it would export, without that trainer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slime.cli.main import main
from slime.training.state import checkpoint
from slime.training.state.adapter_files import PREFIX, WEIGHTS
from tests.support.adapters import fill_b
from tests.support.families import write_family
from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch
from tests.support.training_ranks import run_layouts


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


@pytest.mark.slow
def test_adapters_are_merged(tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    """Law: as the trainer exports them; in float32 with masters of adapters, rounded to nothing less."""
    backend = make_backend(write_tiny_model(tmp_path / "m", "qwen3"), megatron={"bf16": True}, lora_rank=4)
    for _ in range(3):
        backend.train(random_batch())
    want = {name: t.clone() for name, t in backend.iter_hf_tensors()}
    path = _save(backend, tmp_path / "save", 0)
    got, wide = _converted(path, tmp_path / "out"), _converted(path, tmp_path / "wide", "--to", "fp32")
    assert all(torch.equal(got[n], tensor) for n, tensor in want.items())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(wide[name].bfloat16().float(), wide[name])
    torch.testing.assert_close(wide[name], want[name].float(), rtol=1e-2, atol=1e-3)


def test_adapters_alone_are_what_merging_adds(
    tmp_path: Path, make_backend: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: scale * B A of PEFT's tensors, for every module of a fused layer, is the merged weight less the model's."""
    source = write_tiny_model(tmp_path / "m", "qwen3")
    backend = make_backend(source, lora_rank=4, lora_alpha=6.0)
    fill_b(backend)
    checkpoint_folder = _save(backend, tmp_path / "save", 0)
    backend.save_hf(tmp_path / "export")
    command = [
        "convert",
        str(checkpoint_folder),
        str(tmp_path / "peft"),
        "--to",
        "peft",
        "--hf-checkpoint",
        str(source),
    ]
    assert main(command) == 0
    assert "adapter_model.safetensors: " in capsys.readouterr().out
    own, merged = load_file(source / "model.safetensors"), load_file(tmp_path / "export" / "model.safetensors")
    for folder in (tmp_path / "peft", tmp_path / "export" / "adapter"):
        config, tensors = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / WEIGHTS)
        scale = config["lora_alpha"] / config["r"]
        assert (config["r"], scale, config["base_model_name_or_path"]) == (4, 1.5, str(source.resolve()))
        assert config["target_modules"] == sorted(f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down"))
        modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors}
        assert len(modules) * 2 == len(tensors)
        for name, weight in own.items():
            module = name.removesuffix(".weight")
            added = torch.zeros(())
            if module in modules:
                a, b = (tensors[f"{PREFIX}{module}.lora_{part}.weight"].float() for part in "AB")
                added = scale * (b @ a)
            torch.testing.assert_close(merged[name].float(), weight.float() + added, rtol=0, atol=1e-6)
    assert {name.rpartition(".")[2] for name in modules} == set(config["target_modules"])


def test_peft_reads_the_adapters(tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    """Law: the package itself puts them on the model and gets the logits of the merged one."""
    peft = pytest.importorskip("peft")
    source = write_tiny_model(tmp_path / "m", "qwen3")
    backend = make_backend(source, lora_rank=4, lora_target_modules=(r"layers.1.*(q_proj|o_proj)", "up_proj"))
    fill_b(backend)
    backend.save_hf(tmp_path / "export")
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(6, 40)[None]
    want, plain = (load(f, dtype=torch.float32)(tokens).logits for f in (tmp_path / "export", source))
    model = peft.PeftModel.from_pretrained(load(source, dtype=torch.float32), str(tmp_path / "export" / "adapter"))
    torch.testing.assert_close(model(tokens).logits, want, rtol=0, atol=1e-4)
    assert (want - plain).abs().max() > 1e-2


def test_there_are_adapters_to_write(
    tmp_path: Path, make_backend: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: neither a run without adapters nor a Hugging Face folder has any."""
    source = write_tiny_model(tmp_path / "m", "qwen3")
    _save(make_backend(source), tmp_path / "save", 0)
    for folder, why in ((tmp_path / "save", "has no adapters"), (source, "has none")):
        assert main(["convert", str(folder), str(tmp_path / "out"), "--to", "peft"]) == 2
        assert why in capsys.readouterr().err


def test_the_damaged_and_the_foreign_are_refused(
    tmp_path: Path, make_backend: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: no export is made of an altered file, nor with tensors of another model."""
    path = _save(make_backend(write_tiny_model(tmp_path / "m", "qwen3", tied=True)), tmp_path / "save", 0)
    other = write_tiny_model(tmp_path / "other", "qwen3", tied=False)
    assert main(["convert", str(path), str(tmp_path / "out"), "--hf-checkpoint", str(other)]) == 2
    assert f"--hf-checkpoint {other} is a different model" in capsys.readouterr().err
    file = path / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)
    assert main(["convert", str(path), str(tmp_path / "out")]) == 2
    assert "rank_00000.safetensors was altered" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


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


def test_training_from_fp8_is_training_from_what_it_dequantises_to(
    tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    write_tiny_model(tmp_path / "m", "qwen3", hidden_size=160)
    for source, to in (("m", "fp8"), ("fp8", "fp32")):
        assert main(["convert", str(tmp_path / source), str(tmp_path / to), "--to", to]) == 0
    batch, log_probs = random_batch(), {}
    for name in ("m", "fp8", "fp32"):
        backend = make_backend(tmp_path / name)
        log_probs[name] = torch.cat([torch.from_numpy(x) for x in backend.log_probs(batch)])
        backend.save_hf(tmp_path / "export" / name)
    assert torch.equal(log_probs["fp8"], log_probs["fp32"])
    assert 0 < (log_probs["fp8"] - log_probs["m"]).abs().mean() < 0.05
    got, want = (load_file(tmp_path / folder / "model.safetensors") for folder in ("export/fp8", "fp32"))
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)
    assert "quantization_config" not in (tmp_path / "export" / "fp8" / "config.json").read_text()


@pytest.mark.slow
def test_under_every_layout(tmp_path: Path, ranks: Ranks) -> None:
    """Pieces of tensor, pipeline, expert and data ranks make the files that those ranks would export together."""
    experts = str(write_tiny_model(tmp_path / "m", "qwen3_moe"))
    dense = str(write_tiny_model(tmp_path / "d", "qwen3", tied=True))
    tp2, ep2 = {"tensor_model_parallel_size": 2}, {"expert_model_parallel_size": 2}
    cuts: dict[str, tuple[str, dict[str, Any]]] = {
        "dp2": (experts, {}),
        "tp2": (dense, tp2),
        "pp2": (dense, {"pipeline_model_parallel_size": 2}),
        "sp2ep2": (experts, {**tp2, **ep2, "sequence_parallel": True}),
    }
    layouts = {name: {"checkpoint": m, "megatron": {**cut, "bf16": True}} for name, (m, cut) in cuts.items()}
    defaults = {"world_size": 2, "rounds": 1, "save_after": 1}
    for name, outcome in run_layouts(ranks, tmp_path / "run", layouts, defaults=defaults).items():
        root = tmp_path / "save" / name
        parts = checkpoint.begin(root, 0)
        shutil.copytree(tmp_path / "run" / name / "after_1", parts, dirs_exist_ok=True)
        checkpoint.commit(parts, 0)
        got = _converted(root, tmp_path / "out" / name)
        assert got.keys() == outcome.weights.keys(), name
        assert all(torch.equal(got[n], want) for n, want in outcome.weights.items()), name
        masters = _converted(root, tmp_path / "fp32" / name, "--to", "fp32")
        assert all(torch.equal(masters[n].bfloat16(), want) for n, want in outcome.weights.items()), name
