"""`--optimizer-cpu-offload` and `--use-precision-aware-optimizer`: steps are AdamW's, resume equals not stopping."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.marks import quick
from tests.support.ranks import Ranks
from tests.support.training import random_batch
from tests.support.training_ranks import run_layouts

OFFLOAD: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
PRECISE: dict[str, Any] = {
    "use_precision_aware_optimizer": True,
    "main_params_dtype": "float16",
    "exp_avg_dtype": "bfloat16",
    "exp_avg_sq_dtype": "bfloat16",
}
HALF: dict[str, Any] = {"bf16": True, "adam_eps": 1e-3}
"""A large epsilon: a step depends on the size of a gradient, and not on its sign alone."""


def _weights(backend: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.iter_hf_tensors()}


@pytest.mark.parametrize("dtype", quick([{}, HALF], {}), ids=["float32", "bfloat16"])
def test_the_offloaded_optimizer_makes_the_same_steps(
    dtype: dict[str, Any], tiny_qwen3: Path, make_backend: Callable[..., Any]
) -> None:
    found = []
    for settings in ({}, OFFLOAD):
        backend = make_backend(tiny_qwen3, megatron={**dtype, **settings})
        metrics = [backend.train(random_batch(seed=s)) for s in range(3)]
        found.append((metrics, _weights(backend)))
    (first, want), (second, got) = found
    for one, other in zip(first, second, strict=True):
        assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-2 if dtype else 1e-5)
    for name, tensor in want.items():
        limit = 2 * torch.finfo(tensor.dtype).eps if dtype else 1e-5
        torch.testing.assert_close(got[name], tensor, rtol=limit, atol=limit * float(tensor.abs().max()), msg=name)


@pytest.mark.parametrize(
    "settings",
    quick([OFFLOAD, PRECISE, {**OFFLOAD, **PRECISE}], {**OFFLOAD, **PRECISE}),
    ids=["offload", "precise", "both"],
)
def test_resume_equals_not_stopping(
    settings: dict[str, Any], tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    megatron = {**HALF, **settings}
    batches = [random_batch(seed=s) for s in range(4)]
    whole = make_backend(tiny_qwen3, megatron=megatron)
    metrics = [whole.train(b) for b in batches[:2]]
    whole.save(tmp_path / "mid")
    metrics += [whole.train(b) for b in batches[2:]]
    whole.save(tmp_path / "end")
    whole.sleep()
    whole.wake()
    resumed = make_backend(tiny_qwen3, megatron=megatron)
    resumed.load(tmp_path / "mid")
    assert [resumed.train(b) for b in batches[2:]] == metrics[2:]
    resumed.save(tmp_path / "again")
    for file in (tmp_path / "end").glob("rank_*"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_a_checkpoint_goes_from_one_way_of_holding_state_to_another(
    tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    """Offloaded state has the bits of what it came from, and gives them back."""
    first = make_backend(tiny_qwen3, megatron=HALF)
    first.train(random_batch())
    first.save(tmp_path / "plain")
    for settings, source, target in ((OFFLOAD, "plain", "offloaded"), ({}, "offloaded", "back")):
        backend = make_backend(tiny_qwen3, megatron={**HALF, **settings})
        backend.load(tmp_path / source)
        backend.save(tmp_path / target)
        for file in (tmp_path / "plain").glob("rank_*.safetensors"):
            assert file.read_bytes() == (tmp_path / target / file.name).read_bytes(), target
    precise = make_backend(tiny_qwen3, megatron={**HALF, **PRECISE})
    precise.load(tmp_path / "back")
    assert precise.train(random_batch(seed=1))["train/grad_norm"] > 0
    precise.save(tmp_path / "precise")
    again = make_backend(tiny_qwen3, megatron=HALF)
    again.load(tmp_path / "precise")
    assert again.train(random_batch(seed=2))["train/grad_norm"] > 0


def test_weights_alone_start_the_masters_again(
    tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    first = make_backend(tiny_qwen3, megatron={**HALF, **OFFLOAD}, no_save_optim=True)
    first.train(random_batch())
    first.save(tmp_path / "mid")
    want = _weights(first)
    backend = make_backend(tiny_qwen3, megatron={**HALF, **OFFLOAD, "lr": 0.0}, no_load_optim=True)
    backend.load(tmp_path / "mid")
    backend.train(random_batch())
    assert all(torch.equal(tensor, want[name]) for name, tensor in _weights(backend).items())


@pytest.mark.slow
def test_shards_of_two_ranks_make_the_steps_of_one(tiny_qwen3: Path, tmp_path: Path, ranks: Ranks) -> None:
    layouts: dict[str, dict[str, Any]] = {
        "plain": {"world_size": 1, "megatron": {}},
        "dp2": {"world_size": 2, "megatron": OFFLOAD},
        "tp2": {"world_size": 2, "megatron": {**OFFLOAD, "tensor_model_parallel_size": 2}},
    }
    defaults = {"checkpoint": str(tiny_qwen3), "rounds": 2, "provoke": False}
    outcomes = run_layouts(ranks, tmp_path, layouts, defaults=defaults)
    want = outcomes.pop("plain")
    for layout, got in outcomes.items():
        for one, other in zip(want.result["metrics"], got.result["metrics"], strict=True):
            assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-3), layout
        for name, tensor in want.weights.items():
            torch.testing.assert_close(got.weights[name], tensor, rtol=1e-2, atol=2e-4, msg=f"{layout} {name}")
