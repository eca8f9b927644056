"""RMSNorm over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467), rounded as in transformers.

Statistics are float32. The normalized value is rounded to the input dtype and then multiplied by the weight. A
zero-centered weight (Gemma, Qwen3-Next) stores the difference from 1 and is multiplied in float32 before rounding.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from slime.ops.select import FUSED, name_of, num_processors


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """x [..., H], weight [H] -> [..., H], in the chosen form. The fused form requires equal dtypes."""
    if name_of("norm", x) == FUSED:
        out: Tensor = FusedNorm.apply(x, weight, eps, zero_centered)
        return out
    return reference(x, weight, eps, zero_centered=zero_centered)


def add_and_normalise(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x [T, H] to `residual` in place, and returns the norm of the sum [T, H]. Without a gradient."""
    if name_of("norm", x) == FUSED:
        kernels: Any = importlib.import_module("slime.ops.kernels.norm")
        out: Tensor = kernels.forward(x, weight, eps, False, residual)[0]
        return out
    return reference(residual.add_(x), weight, eps)


def reference(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if zero_centered:
        return (normed * (1 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


class FusedNorm(torch.autograd.Function):
    """One forward kernel, one backward kernel, and one that sums the weight's partial gradients in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        assert x.dtype == weight.dtype, f"the input is {x.dtype}, but the weight is {weight.dtype}"
        kernels: Any = importlib.import_module("slime.ops.kernels.norm")
        rows = x.reshape(-1, x.size(-1))
        out, scale = kernels.forward(rows, weight, eps, zero_centered)
        ctx.save_for_backward(rows, weight, scale)
        ctx.zero_centered = zero_centered
        result: Tensor = out.view(x.shape)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        kernels: Any = importlib.import_module("slime.ops.kernels.norm")
        rows, weight, scale = ctx.saved_tensors
        (grad,) = grads
        of_rows, of_weight = kernels.backward(
            grad.reshape(rows.shape),
            rows,
            weight,
            scale,
            ctx.zero_centered,
            needs_weight=ctx.needs_input_grad[1],
            num_processors=num_processors(rows.device),
        )
        return of_rows.view(grad.shape), of_weight, None, None
