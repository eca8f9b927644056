"""FP8 training on a GPU: kernels quantise as the reference does, and the trainer computes the recipe.

python -m pytest tests/gpu/test_fp8_on_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.ops import linear, select
from tests.gpu.conftest import Figure
from tests.support.families import write_family
from tests.support.ranks import Ranks
from tests.support.training_ranks import run_layouts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise"}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Any:
    pytest.importorskip("deep_gemm", reason="needs sgl-deep-gemm")
    before = dict(select._chosen)
    select.use(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, "auto", fp8=True)
    assert select.name_of("fp8", torch.zeros(1, device="cuda")) == select.DEEP_GEMM
    yield
    select._chosen.clear()
    select._chosen.update(before)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16).cuda()


@pytest.mark.parametrize("shape", [(304, 208), (128, 256), (576, 1536), (2560, 9728)])
def test_kernels_quantise_as_the_reference_does(shape: tuple[int, int]) -> None:
    from slime.ops.kernels import fp8 as kernels

    weight, x = draw(*shape), draw(37, shape[1], seed=1) * 1e-6
    x[3] = 0
    pairs = [
        (kernels.by_rows(x), linear.by_rows(x)),
        (kernels.by_blocks(weight, transposed=False), linear.by_blocks(weight)),
        (kernels.by_blocks(weight, transposed=True), tuple(part.t() for part in linear.by_blocks(weight))),
    ]
    for got, want in pairs:
        assert torch.equal(got[1], want[1]), "scales"
        assert torch.equal(got[0].float(), want[0].float()), "codes"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 37, 1000, 4096])
@pytest.mark.parametrize("shape", [(304, 208), (128, 256), (960, 576), (2560, 9728)])
def test_a_product_is_the_reference_rounded_once(
    shape: tuple[int, int], rows: int, transposed: bool, figure: Figure
) -> None:
    weight, x = draw(*shape), draw(rows, shape[0 if transposed else 1], seed=1)
    got, want = (f(x, weight, transposed=transposed).float() for f in (linear.fp8_product, linear.fp8_reference))
    error = float((got - want).norm() / want.norm())
    figure("error / that of FP8", error / 0.037)
    assert error < 2**-9, "a rounding to bfloat16 costs at most half a step, 2^-9"


def test_a_trainer_on_a_gpu_computes_the_recipe(tmp_path: Path, figure: Figure) -> None:
    """Law: its log-probs and gradients are nearer to the recipe on a CPU than the recipe is to training without FP8."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    checkpoint = write_family(tmp_path / "model", "qwen3", **sizes)
    defaults = {"checkpoint": str(checkpoint), "scenarios": {"four": {}}, "provoke": False, "world_size": 1}
    layouts: dict[str, dict[str, Any]] = {
        "cpu": {"megatron": FP8, "args": {"device": "cpu"}},
        "plain": {"megatron": {}, "args": {"device": "cpu"}},
        "gpu": {"megatron": {**FP8, "bf16": True}, "args": {"device": "cuda"}},
    }
    found = {}
    for names in (("cpu", "plain"), ("gpu",)):
        with Ranks(fresh=True) as ranks:
            found |= run_layouts(ranks, tmp_path / names[0], {n: layouts[n] for n in names}, defaults=defaults)
    rows = {name: np.concatenate(outcome.result["log_probs"]) for name, outcome in found.items()}
    near, far = (float(np.abs(rows[name] - rows["cpu"]).mean()) for name in ("gpu", "plain"))
    figure("log-probs, from the recipe", near)
    figure("log-probs, recipe from float32", far)
    assert near < far
    recipe, plain, gpu = (found[name].gradients["four"] for name in ("cpu", "plain", "gpu"))
    distances = [
        [float((other[name] - own).norm() / own.norm()) for other in (gpu, plain)]
        for name, own in recipe.items()
        if float(own.norm()) > 1e-6
    ]
    near, far = (float(np.median(column)) for column in zip(*distances, strict=True))
    figure("gradients, from the recipe", near)
    figure("gradients, recipe from float32", far)
    assert near < far
