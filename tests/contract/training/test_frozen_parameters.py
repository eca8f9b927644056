"""What is frozen keeps its bits, and what is trained gets the gradient that it has in the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch
from tests.support.training_ranks import run_layouts


def _tensors(backend: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.iter_hf_tensors()}


CHOICES: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "freeze by HF name": (
        {"freeze_params_name_list": ("embed_tokens", r"layers\.0\.")},
        lambda n: "embed_tokens" not in n and "layers.0." not in n,
    ),
    "freeze by Megatron name": ({"freeze_params_name_list": (r"mlp\.linear_fc",)}, lambda n: ".mlp." not in n),
    "only": (
        {"only_train_params_name_list": ("self_attention", "final_layernorm")},
        lambda n: "self_attn" in n or n == "model.norm.weight",
    ),
}


@pytest.mark.parametrize("choice", ["only", *(pytest.param(c, marks=pytest.mark.slow) for c in CHOICES if c != "only")])
def test_frozen_bits_stay(choice: str, tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    settings, is_trained = CHOICES[choice]
    batch = random_batch()
    whole = make_backend(tiny_qwen3).gradients(batch)
    backend = make_backend(tiny_qwen3, **settings)
    before, gradients = _tensors(backend), backend.gradients(batch)
    trained = {n for n in before if is_trained(n) or (n == "lm_head.weight" and is_trained("embed_tokens"))}
    assert gradients.keys() == trained and trained < before.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-6)
    norm = float(sum(g.double().square().sum() for g in gradients.values()).sqrt())
    assert backend.train(batch)["train/grad_norm"] == pytest.approx(norm, rel=1e-5), "the norm is of what is trained"
    backend.save(tmp_path / "mid")
    want = backend.train(batch)
    after = _tensors(backend)
    assert {n for n in after if not torch.equal(after[n], before[n])} == trained
    again = make_backend(tiny_qwen3, **settings)
    again.load(tmp_path / "mid")
    assert again.train(batch) == want
    backend.sleep()
    backend.wake()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"lora_rank": 2}, {"freeze_params_name_list": ("embedding",)}], ids=str)
def test_recomputation_loses_no_gradient(
    settings: dict[str, Any], tiny_qwen3: Path, make_backend: Callable[..., Any]
) -> None:
    """Its input is a frozen embedding, so that autograd would see nothing to differentiate in a block."""
    batch = random_batch()
    want = make_backend(tiny_qwen3, **settings).gradients(batch)
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    got = make_backend(tiny_qwen3, megatron=recompute, **settings).gradients(batch)
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "only"),
    [
        ("qwen3", r"layers\.[23]\."),
        ("qwen3", r"layers\.0\."),
        ("qwen3_moe", "experts"),
        ("qwen3_moe", r"layers\.3\.mlp\.experts"),
    ],
)
def test_a_rank_with_nothing_to_train_goes_along(family: str, only: str, tmp_path: Path, ranks: Ranks) -> None:
    checkpoint = write_tiny_model(tmp_path / "model", family, num_hidden_layers=4)
    pp = {"pipeline_model_parallel_size": 2}
    layouts = {
        "one": {"world_size": 1, "megatron": {}},
        "pp2": {"world_size": 2, "megatron": pp},
        "vp2": {"world_size": 2, "megatron": {**pp, "virtual_pipeline_model_parallel_size": 2}},
        "dp2": {"world_size": 2, "megatron": {"overlap_grad_reduce": True}},
    }
    defaults = {
        "checkpoint": str(checkpoint),
        "scenarios": {"packed": {}},
        "rounds": 2,
        "save_end": True,
        "args": {"only_train_params_name_list": (only,)},
    }
    outcomes = run_layouts(ranks, tmp_path / "out", layouts, defaults=defaults)
    one = outcomes["one"]
    for layout, other in outcomes.items():
        assert other.gradients["packed"].keys() == one.gradients["packed"].keys()
        for name, gradient in one.gradients["packed"].items():
            torch.testing.assert_close(other.gradients["packed"][name], gradient, rtol=1e-4, atol=1e-6, msg=layout)
        for before, after in zip(one.result["metrics"], other.result["metrics"], strict=True):
            assert after["train/grad_norm"] == pytest.approx(before["train/grad_norm"], rel=1e-5), layout
        for name, tensor in one.weights.items():
            assert float((other.weights[name] - tensor).abs().max()) < 1e-5, f"{layout}: {name}"
