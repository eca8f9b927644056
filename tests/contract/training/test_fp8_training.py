"""`--fp8-format e4m3 --fp8-recipe blockwise`: the trainer computes what the recipe says, in any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.core.errors import ConfigError
from tests.support.families import load_model, reference, write_family
from tests.support.quantised import write_quantised
from tests.support.ranks import Ranks
from tests.support.training import random_batch
from tests.support.training_ranks import Outcome, run_layouts

FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
LIMIT = 0.3
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def _rounded(x: Tensor, height: int) -> Tensor:
    """The values of x [N, K] in e4m3, with a scale for each block of `height` x 128."""
    blocks = x.detach().unflatten(1, (-1, 128)).unflatten(0, (-1, height))
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-30) / 448
    return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).flatten(2).flatten(0, 1)


class _Recipe(torch.autograd.Function):
    """The recipe in plain PyTorch: both factors of the product and of its input's gradient are rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _rounded(x, 1) @ _rounded(weight, 128).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return _rounded(grads[0], 1) @ _rounded(weight, 128), grads[0].t() @ x


def _with_the_recipe(checkpoint: Path) -> Any:
    model = load_model(checkpoint)
    for layer in model.model.layers:
        for linear in (m for m in layer.modules() if isinstance(m, torch.nn.Linear)):
            linear.forward = lambda x, own=linear: _Recipe.apply(x.flatten(0, -2), own.weight).view(*x.shape[:-1], -1)
    return model


def test_gradients_and_log_probs_are_those_of_the_recipe_in_transformers(
    tmp_path: Path, make_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rounding that differs in its last bit can change a code by 2^-4, hence the limits, relative to what FP8 does.
    Without the rounding of one factor, the distance would be at least half of that.
    """
    checkpoint, batch = write_family(tmp_path / "model", "qwen3", **SIZES), random_batch()
    plain, plain_gradients = reference(checkpoint, batch, tmp_path / "plain")
    monkeypatch.setattr("tests.support.families.load_model", _with_the_recipe)
    want, want_gradients = reference(checkpoint, batch, tmp_path / "recipe")
    backend = make_backend(checkpoint, megatron=FP8, loss_type="sft_loss", calculate_per_token_loss=True)
    got = [torch.from_numpy(x) for x in backend.log_probs(batch)]
    far, error = (
        torch.cat([(a - torch.from_numpy(b)).abs() for a, b in zip(got, other, strict=True)]).mean()
        for other in (plain, want)
    )
    assert error < LIMIT * far, (error, far)
    gradients = backend.gradients(batch)
    for name, gradient in want_gradients.items():
        error = (gradients[name] - gradient).norm() / gradient.norm()
        far = (plain_gradients[name] - gradient).norm() / gradient.norm()
        assert error < max(LIMIT * far, 1e-3), f"{name}: {error:.1e}, and FP8 changes it by {far:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_training_does_not_depend_on_the_partition(tmp_path: Path, ranks: Ranks, family: str) -> None:
    """Up to codes that another order of additions changes, as above."""
    more = {"moe_intermediate_size": 128, "mlp_only_layers": []} if family == "qwen3_moe" else {}
    checkpoint = write_family(tmp_path / "m", family, **SIZES, **more)
    two = {**FP8, "tensor_model_parallel_size": 2}
    layouts: dict[str, dict[str, Any]] = {
        "one": {"world_size": 1, "megatron": FP8},
        "without": {"world_size": 1, "megatron": {}},
        "tensor": {"world_size": 2, "megatron": {**two, "sequence_parallel": False}},
        "sequence": {"world_size": 2, "megatron": {**two, "sequence_parallel": True}},
        "stages": {"world_size": 2, "megatron": {**FP8, "pipeline_model_parallel_size": 2}},
        "data": {"world_size": 2, "megatron": FP8},
    }
    if family == "qwen3_moe":
        del layouts["tensor"]  # Megatron refuses it
    defaults = {"checkpoint": str(checkpoint), "scenarios": {"all": {}}, "rounds": 1, "provoke": False}
    found = run_layouts(ranks, tmp_path, layouts, defaults=defaults)
    one, without = found.pop("one"), found.pop("without")

    def far(outcome: Outcome) -> dict[str, float]:
        gradients = {
            name: float((outcome.gradients["all"][name] - own).norm()) for name, own in one.gradients["all"].items()
        }
        rows = [np.concatenate(each.result["log_probs"]) for each in (outcome, one)]
        return {**gradients, "log-probs": float(np.abs(rows[0] - rows[1]).mean())}

    limits = far(without)
    for name, outcome in found.items():
        for key, error in far(outcome).items():
            assert error <= 0.5 * limits[key] + 1e-7, f"{name}: {key} differs by {error:.1e}, FP8 {limits[key]:.1e}"


def test_a_checkpoint_in_another_format_is_refused(tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    source = write_family(tmp_path / "m", "qwen3", **SIZES)
    folder, _ = write_quantised(source, tmp_path / "int4", "int4")
    with pytest.raises(ConfigError, match="drop --fp8-format"):
        make_backend(folder, megatron=FP8)
