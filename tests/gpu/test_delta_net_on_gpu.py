"""Gated delta nets on a GPU: plain PyTorch, the Triton kernels and those of flash-linear-attention against a CPU.

python -m pytest tests/gpu/test_delta_net_on_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime.ops.delta_rule import DeltaRule, chunked, fla_kernels, fused, kernel_problems
from tests.gpu.conftest import Figure
from tests.support.qwen_next import write_qwen_next
from tests.support.training_ranks import run_on_cpu_and_gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PROBLEMS = kernel_problems(torch.device("cuda"), torch.bfloat16) if torch.cuda.is_available() else ["no GPU"]
needs_kernels = pytest.mark.skipif(bool(PROBLEMS), reason=" and ".join(PROBLEMS))

LENGTHS = (300, 7, 64, 1, 129)
HEADS = 4


def _value_and_gradients(rule: DeltaRule, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32).to(leaves[0].device)
    out = rule(*leaves, LENGTHS, cu_seqlens)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).bfloat16().to(out.dtype).view_as(out)  # exact
    return [x.detach().float().cpu() for x in (out, *torch.autograd.grad((out * weights).sum(), leaves))]


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(
    ("rule", "dtype", "limit"),
    [
        (chunked, torch.float32, 1e-4),
        (fused, torch.float32, 1e-4),
        (fused, torch.bfloat16, 4e-3),
        pytest.param(fla_kernels, torch.bfloat16, 3e-2, marks=needs_kernels),
    ],
)
def test_the_recurrence_equals_that_of_a_cpu(rule: DeltaRule, dtype: torch.dtype, limit: float, size: int) -> None:
    """Plain PyTorch on the CPU, in float64. Rounding to bfloat16 alone is an error of 2e-3."""
    torch.manual_seed(0)
    num_tokens = sum(LENGTHS)
    q, k, v = (torch.randn(num_tokens, HEADS, size).to(dtype) for _ in range(3))
    g, beta = -torch.rand(num_tokens, HEADS), torch.rand(num_tokens, HEADS).to(dtype)
    want = _value_and_gradients(chunked, [x.double() for x in (q, k, v, g, beta)])
    got = _value_and_gradients(rule, [x.cuda() for x in (q, k, v, g, beta)])
    for name, a, b in zip(("out", "q", "k", "v", "g", "beta"), want, got, strict=True):
        error = float((a - b).norm() / a.norm())
        assert error < limit, f"{name} differs by {error:.1e} of its norm"


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_a_trainer_on_a_gpu_is_that_on_a_cpu(tmp_path: Path, family: str, figure: Figure) -> None:
    wide = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
    checkpoint = write_qwen_next(tmp_path / "model", family, **wide)
    devices: dict[str, dict] = {
        "cpu": {"args": {"device": "cpu"}},
        "gpu": {"args": {"device": "cuda"}},
        "half_torch": {"args": {"device": "cuda", "qwen_gdn_backend": "torch"}, "megatron": {"bf16": True}},
        "half_auto": {"args": {"device": "cuda"}, "megatron": {"bf16": True}},
    }
    far = run_on_cpu_and_gpu(tmp_path, checkpoint, devices, figure)
    plain, kernels = far["half_torch"], far["half_auto"]
    assert kernels < 2 * plain + 1e-3, f"kernels are off by {kernels:.1e} on average, plain PyTorch by {plain:.1e}"
