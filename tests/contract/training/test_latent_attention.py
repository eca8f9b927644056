"""Latent attention beyond the layouts that all families share: context parallelism, recomputation, what is frozen or
carried along, and cuts that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.core.errors import ConfigError
from slime.models.deepseek import layers
from slime.ops import attention
from tests.support.families import reference, write_family
from tests.support.ranks import Ranks
from tests.support.tensor_sizes import LargestTensor
from tests.support.training import random_batch
from tests.support.training_ranks import run_layouts

SFT = {"loss_type": "sft_loss", "calculate_per_token_loss": True, "micro_batch_size": 3}


def _relative(got: dict[str, Any], want: dict[str, Any]) -> float:
    """The worst difference, relative to each tensor's largest entry."""
    return max(float((got[n] - want[n]).abs().max() / want[n].abs().max().clamp_min(1e-3)) for n in got)


@pytest.mark.slow
def test_context_parallel_ranks_have_the_gradient_of_transformers(tmp_path: Path, ranks: Ranks) -> None:
    """GLM-5 with sequences that its indexer leaves whole, and DeepSeek-V3."""
    batch = random_batch(seed=3)
    models = {"deepseek_v3": {}, "glm_moe_dsa": {"index_topk": 64}}
    folders = {name: write_family(tmp_path / "models" / name, name, **own) for name, own in models.items()}
    layouts = {name: {"checkpoint": str(folder)} for name, folder in folders.items()}
    defaults = {
        "world_size": 2,
        "megatron": {"context_parallel_size": 2},
        "args": SFT,
        "scenarios": {"loss": {}},
        "seed": 3,
        "provoke": False,
    }
    outcomes = run_layouts(ranks, tmp_path / "runs", layouts, defaults=defaults)
    for name, folder in folders.items():
        log_probs, gradients = reference(folder, batch, tmp_path / "gradients" / name)
        got = outcomes[name]
        for mine, want in zip(got.result["log_probs"], log_probs, strict=True):
            assert np.abs(np.asarray(mine) - want).max() < 1e-5
        assert _relative(got.gradients["loss"], gradients) < 1e-5


RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "blocks of layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "core attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


@pytest.mark.slow
def test_recomputation_finds_the_choice_of_the_right_layer(tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    checkpoint = write_family(tmp_path / "m", "glm_moe_dsa")
    batch = random_batch(seed=3)
    want = make_backend(checkpoint, **SFT).gradients(batch)
    for settings in RECOMPUTE.values():
        assert _relative(make_backend(checkpoint, megatron=settings, **SFT).gradients(batch), want) < 1e-6


@pytest.mark.parametrize("recompute", [None, pytest.param("full", marks=pytest.mark.slow)])
def test_sparse_attention_makes_no_tensor_with_an_element_per_pair_of_tokens(
    recompute: str | None, tmp_path: Path, make_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: beyond `index_topk` tokens, memory grows with the number of tokens, not with its square."""
    _at_once(monkeypatch, 1 << 16)
    narrow = {"index_topk": 64, "index_n_heads": 2, "max_position_embeddings": 2048}
    checkpoint = write_family(tmp_path / "m", "glm_moe_dsa", **narrow)
    batch = random_batch(1, 1, seed=3, response_lengths=(1000, 1016))
    backend = make_backend(checkpoint, megatron=RECOMPUTE.get(recompute or ""), **SFT)
    with LargestTensor() as largest:
        backend.gradients(batch)
    assert largest.num_elements < batch.samples[0].num_tokens ** 2 / 2, largest.made_by


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_long_samples_have_the_gradient_of_transformers(
    family: str, tmp_path: Path, make_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the length from which keys are gathered, in many blocks; a row also has samples that see all keys."""
    _at_once(monkeypatch, 2000)
    checkpoint = write_family(tmp_path / "model", family)
    batch = random_batch(seed=3, response_lengths=(2, 90))
    log_probs, gradients = reference(checkpoint, batch, tmp_path / "gradients")
    backend = make_backend(checkpoint, **SFT)
    for mine, want in zip(backend.log_probs(batch), log_probs, strict=True):
        assert np.abs(np.asarray(mine) - want).max() < 1e-5
    assert _relative(backend.gradients(batch), gradients) < 1e-4


def _at_once(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    """Makes the attention and its indexer work in blocks of this size."""
    monkeypatch.setattr(attention, "ENTRIES_AT_ONCE", entries)
    monkeypatch.setattr(layers, "SCORES_AT_ONCE", entries)


def test_training_leaves_the_indexer_alone_and_carries_other_layers(
    tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    """Layers for multi-token prediction and indexers that no layer uses come back bit for bit."""
    checkpoint = write_family(tmp_path / "m", "glm_moe_dsa", num_nextn_predict_layers=1)
    tensors = load_file(checkpoint / "model.safetensors")
    carried = {
        "model.layers.4.eh_proj.weight": torch.randn(64, 128),
        "model.layers.1.self_attn.indexer.wk.weight": torch.randn(16, 64),
    }
    save_file({**tensors, **carried}, checkpoint / "model.safetensors", {"format": "pt"})
    backend = make_backend(checkpoint, **SFT)
    backend.train(random_batch(seed=3))
    backend.save_hf(tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == tensors.keys() | carried.keys()
    same = {name for name, tensor in {**tensors, **carried}.items() if torch.equal(tensor, after[name])}
    frozen = {name for name in tensors if ".indexer." in name or name.endswith("e_score_correction_bias")}
    assert same == frozen | carried.keys()


@pytest.mark.slow
def test_in_bfloat16_the_norm_of_the_indexer_stays_wide(tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    checkpoint = write_family(tmp_path / "m", "glm_moe_dsa")
    backend = make_backend(checkpoint, megatron={"bf16": True}, **SFT)
    assert np.isfinite(backend.train(random_batch(seed=3))["train/loss"])
    wide = {name for name, tensor in backend.iter_hf_tensors() if tensor.dtype == torch.float32}
    assert wide and all(".indexer.k_norm." in n or n.endswith("e_score_correction_bias") for n in wide)


def test_a_stage_that_begins_with_a_shared_choice_is_refused() -> None:
    from slime.models.deepseek.layers import check_stages

    kinds = ["full", "shared", "shared", "full"]
    with pytest.raises(ConfigError, match="layer 2"):
        check_stages(kinds, first_layers=[0, 2])
    check_stages(kinds, first_layers=[0, 3])
    check_stages([], first_layers=[0, 2])
