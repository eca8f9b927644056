"""Experts on a GPU: each operation, then a whole trainer, against the plain form in a wider dtype.

What is allowed is a multiple of the error that the plain PyTorch form makes in the same dtype: values and gradients.

python -m pytest tests/gpu/test_experts_on_gpu.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.ops.experts import (
    RowGroups,
    form_of,
    gather_rows,
    grouped_linear,
    grouped_problems,
    plan_rows,
    row_weights,
    sum_rows,
    weighted_swiglu,
)
from tests.gpu.conftest import Figure
from tests.support.tiny import write_tiny_model
from tests.support.training_ranks import run_on_cpu_and_gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)
TIMES = 1.5
"""How much further than the plain form in bfloat16 the GPU's may be from float64, in the norm of the difference."""
FLOOR = 2**-9
"""Of the norm: half a unit of bfloat16, to which a result is rounded, where the plain form is exact by chance."""
SIZES = [(1,), (0, 1, 0), (5, 0, 300, 1, 0, 77), (0, 0, 0), (4096, 0, 33), (0,) * 100 + (9, 3) + (1,) * 26]
SHAPES = [(64, 96), (2048, 1536), (20, 36), (4, 2048)]
"""In and out; sizes that are no multiple of 8, and adapters of rank 4, are padded inside."""


def _results(function: Callable[..., Tensor], leaves: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Value and gradients in `dtype`, as float64. Every call sees the same numbers, and the same gradient above."""
    own = [x.detach().to(dtype).requires_grad_() for x in leaves]
    out = function(*own)
    above = torch.randn(out.shape, device=CUDA, generator=torch.Generator(CUDA).manual_seed(7)).bfloat16()
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, own, above.to(out.dtype)))]


def _compare(fused: Callable[..., Tensor], plain: Callable[..., Tensor], leaves: Sequence[Tensor]) -> None:
    """Leaves hold numbers of bfloat16."""
    want = _results(plain, leaves, torch.float64)
    rough, got = _results(plain, leaves, torch.bfloat16), _results(fused, leaves, torch.bfloat16)
    for number, (true, near, ours) in enumerate(zip(want, rough, got, strict=True)):
        assert ours.shape == true.shape and bool(torch.isfinite(ours).all()), number
        times = TIMES if true.numel() > 16 else 4 * TIMES  # of few numbers the plain form is near by chance
        allowed = times * float((near - true).norm()) + FLOOR * float(true.norm())
        error = float((ours - true).norm())
        assert error <= allowed, f"result {number} is off by {error:.2e}, allowed {allowed:.2e}"


def _randn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed)) * scale).bfloat16()


def test_a_gpu_has_the_fused_form() -> None:
    assert grouped_problems(CUDA, torch.bfloat16) == ()
    assert form_of(torch.zeros(1, device=CUDA)) == "reference", "float32 has no grouped product"


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}x{sum(sizes)}")
@pytest.mark.parametrize(("size_in", "size_out"), SHAPES)
def test_grouped_products(sizes: tuple[int, ...], size_in: int, size_out: int) -> None:
    groups = RowGroups.of(torch.tensor(sizes, device=CUDA), CUDA)
    leaves = _randn(sum(sizes), size_in, seed=1), _randn(len(sizes), size_out, size_in, seed=2, scale=size_in**-0.5)
    # Memory that is used again holds numbers, not the zeros that it has at first.
    torch.full_like(leaves[1], float("nan"))
    _compare(
        lambda x, w: grouped_linear(x, w, groups, "fused"),
        lambda x, w: grouped_linear(x, w, groups, "reference"),
        leaves,
    )
    x, weight = (leaf.requires_grad_() for leaf in leaves)
    (gradient,) = torch.autograd.grad(grouped_linear(x, weight, groups, "fused").sum(), weight)
    assert all(not gradient[e].any() for e, size in enumerate(sizes) if not size), "an empty group has a gradient"


@pytest.mark.parametrize("rows", [0, 1, 13, 5000])
@pytest.mark.parametrize("size", [768, 36, 1, 3000])
@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weighted_swiglu(rows: int, size: int, weights_dtype: torch.dtype) -> None:
    weights = torch.rand(rows, device=CUDA).bfloat16()

    def form(name: Any) -> Callable[..., Tensor]:
        def apply(x: Tensor, w: Tensor) -> Tensor:
            return weighted_swiglu(x, w if x.dtype is torch.float64 else w.to(weights_dtype), name)

        return apply

    _compare(form("fused"), form("reference"), (_randn(rows, 2 * size, seed=3, scale=4.0), weights))
    x = _randn(rows, 2 * size, seed=4)
    plain, fused = (weighted_swiglu(x, weights.to(weights_dtype), name) for name in ("reference", "fused"))
    near = (plain.float() - fused.float()).abs() <= plain.float().abs() * 2**-7
    assert bool(near.all()), "both round the same products"


@pytest.mark.parametrize(("tokens", "experts", "topk"), [(1, 8, 2), (7, 128, 8), (3000, 128, 8), (0, 8, 2), (50, 4, 4)])
@pytest.mark.parametrize("size", [2048, 36])
def test_rows_go_to_their_experts_and_back(tokens: int, experts: int, topk: int, size: int) -> None:
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(5)).topk(topk, dim=-1).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, chosen, True)
    want, plan = plan_rows(routing_map, topk), plan_rows(routing_map.to(CUDA), topk)
    for name in ("tokens", "experts", "slots"):
        assert torch.equal(getattr(plan, name).cpu(), getattr(want, name)), name
    assert plan.groups.sizes == want.groups.sizes
    weights = torch.rand(tokens, experts, device=CUDA)

    def there_and_back(form: Any) -> Callable[[Tensor], Tensor]:
        def apply(x: Tensor) -> Tensor:
            rows = gather_rows(x, plan, form)
            return sum_rows(rows * row_weights(weights, plan).to(rows.dtype)[:, None], plan, form)

        return apply

    _compare(there_and_back("fused"), there_and_back("reference"), (_randn(tokens, size, seed=6),))


def test_no_operation_waits_for_the_gpu() -> None:
    experts, topk, hidden, size = 16, 4, 256, 128
    scores = torch.rand(333, experts, device=CUDA)
    weight1, weight2 = _randn(experts, 2 * size, hidden, seed=1), _randn(experts, hidden, size, seed=2)
    x = _randn(333, hidden, seed=3)

    def layer() -> Tensor:
        leaves = [t.detach().requires_grad_() for t in (x, weight1, weight2)]
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(topk, dim=-1).indices, True)
        plan = plan_rows(routing_map, topk)
        rows = grouped_linear(gather_rows(leaves[0], plan, "fused"), leaves[1], plan.groups, "fused")
        rows = weighted_swiglu(rows, row_weights(scores, plan), "fused")
        out = sum_rows(grouped_linear(rows, leaves[2], plan.groups, "fused"), plan, "fused")
        return torch.autograd.grad(out.float().square().sum(), leaves)[0]

    layer()  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4}], ids=["whole", "adapters"])
def test_a_trainer_on_a_gpu_is_that_on_a_cpu(tmp_path: Path, lora: dict[str, Any], figure: Figure) -> None:
    """float32 runs the reference there; bfloat16 the fused forms, against which stands the error of bfloat16 itself."""
    checkpoint = write_tiny_model(tmp_path / "model", "qwen3_moe", tied=False, num_hidden_layers=2, head_dim=64)
    devices: dict[str, dict[str, Any]] = {
        "cpu": {"args": {"device": "cpu", **lora}},
        "cpu_half": {"args": {"device": "cpu", **lora}, "megatron": {"bf16": True}},
        "gpu": {"args": {"device": "cuda", **lora}},
        "half": {"args": {"device": "cuda", **lora}, "megatron": {"bf16": True}},
    }
    far = run_on_cpu_and_gpu(tmp_path, checkpoint, devices, figure)
    assert far["half"] < 2 * far["cpu_half"] + 1e-3, far
