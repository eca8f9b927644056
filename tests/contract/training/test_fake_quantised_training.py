"""`--trainer-weights fake-quantised`: the trainer computes with the weights that engines will have, in any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.families import write_family
from tests.support.marks import quick
from tests.support.quantised import write_quantised
from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch
from tests.support.training_ranks import run_layouts

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4, "head_dim": 64}
FAKE = {"trainer_weights": "fake-quantised"}


def plain_copy(folder: Path, target: Path, weights: dict[str, torch.Tensor]) -> Path:
    """The folder with other weights and without a quantisation."""
    import json

    target.mkdir()
    for asset in folder.iterdir():
        if asset.suffix != ".safetensors":
            (target / asset.name).write_bytes(asset.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (target / "config.json").write_text(json.dumps(config))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("kind", quick(["fp8", "int4"], "fp8"))
def test_log_probs_are_those_of_the_dequantised_weights(
    tmp_path: Path, make_backend: Callable[..., Any], kind: str
) -> None:
    source = write_tiny_model(tmp_path / "m", "qwen3_moe", moe_intermediate_size=128, **SIZES)
    folder, quantised = write_quantised(source, tmp_path / kind, kind)
    batch, log_probs = random_batch(), {}
    backend = make_backend(folder)
    held = {n: t.clone() for n, t in backend.iter_hf_tensors()}
    faked = {n: quantised.fake(t) if n in quantised.names else t for n, t in held.items()}
    plain_copy(folder, tmp_path / "faked", {n: t.contiguous() for n, t in faked.items()})
    for name, where, settings in (
        ("plain", folder, {}),
        ("fake", folder, FAKE),
        ("dequantised", tmp_path / "faked", {}),
    ):
        backend = make_backend(where, **settings)
        log_probs[name] = torch.cat([torch.from_numpy(x) for x in backend.log_probs(batch)])
        if name == "fake":
            assert all(torch.equal(t, held[n]) for n, t in backend.iter_hf_tensors()), "parameters are as they were"
    assert torch.equal(log_probs["fake"], log_probs["dequantised"])
    if kind == "int4":  # FP8 that was quantised comes back within a rounding of bfloat16
        assert 1e-3 < (log_probs["fake"] - log_probs["plain"]).abs().mean() < 1.0


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {**SIZES, "num_attention_heads": 8},
    "qwen3_moe": {**SIZES, "moe_intermediate_size": 128, "mlp_only_layers": []},
    "glm4_moe": {**SIZES, "moe_intermediate_size": 256},
    "deepseek_v3": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_training_does_not_depend_on_the_partition(tmp_path: Path, ranks: Ranks, family: str) -> None:
    """FP8 folders of published families load and train; two ranks do what one does."""
    source = write_family(tmp_path / "m", family, **FAMILIES[family])
    folder, _ = write_quantised(source, tmp_path / "fp8", "fp8")
    two = {"tensor_model_parallel_size": 2} | ({"expert_model_parallel_size": 2} if family != "qwen3" else {})
    layouts: dict[str, dict[str, Any]] = {
        "one": {"world_size": 1, "megatron": {}},
        "two": {"world_size": 2, "megatron": two | ({"sequence_parallel": True} if family != "qwen3" else {})},
        "stages": {"world_size": 2, "megatron": {"pipeline_model_parallel_size": 2}},
    }
    defaults = {
        "checkpoint": str(folder),
        "args": FAKE,
        "scenarios": {"all": {}},
        "rounds": 1,
        "provoke": False,
    }
    found = run_layouts(ranks, tmp_path, layouts, defaults=defaults)
    one = found["one"]
    assert any(g.abs().max() > 0 for g in one.gradients["all"].values())
    for name in ("two", "stages"):
        for key, want in one.gradients["all"].items():
            got = found[name].gradients["all"][key]
            assert (got - want).norm() <= 1e-4 * want.norm() + 1e-7, f"{name}: {key}"
        for got_row, want_row in zip(found[name].result["log_probs"], one.result["log_probs"], strict=True):
            assert (torch.tensor(got_row) - torch.tensor(want_row)).abs().max() < 1e-4


def test_weights_and_scales_of_files_have_one_name(tmp_path: Path) -> None:
    """What the reader lists is the model's tensors; the files hold parts."""
    from slime.training.state.hf_files import HfReader

    source = write_tiny_model(tmp_path / "m", "qwen3", **SIZES)
    for kind in ("fp8", "int4"):
        folder, quantised = write_quantised(source, tmp_path / kind, kind)
        with HfReader(folder) as read, HfReader(source) as plain:
            assert set(read.names) == set(plain.names)
            name = next(iter(quantised.names))
            assert read(name).shape == plain(name).shape
            assert len(load_file(folder / "model.safetensors")) > len(read.names)
