"""SwiGLU (Shazeer 2020, arXiv:2002.05202) of the rows of experts, times the router's weight of each row.

Invariant: each factor is rounded to the dtype of the rows, in both forms: silu(gate), its product with `up`, and the
product of that with the weight, which may be float32.
"""

from __future__ import annotations

from typing import Any, assert_never

import torch
from torch import Tensor

from slime.ops import swiglu
from slime.ops.grouped import Form


def weighted_swiglu(x: Tensor, weights: Tensor, form: Form) -> Tensor:
    """x [rows, 2F], gates before values, weights [rows] -> silu(gate) * value * weight [rows, F], dtype of x."""
    match form:
        case "reference":
            return (swiglu.reference(x) * weights.unsqueeze(-1)).to(x.dtype)
        case "fused":
            return _WeightedSwiGLU.apply(x, weights)
    assert_never(form)


class _WeightedSwiGLU(torch.autograd.Function):
    """Gradients are computed in float32 from the rounded products, and rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        from slime.ops.kernels.experts import swiglu_forward  # Triton, which a CPU may lack

        x, weights = x.contiguous(), weights.contiguous()
        ctx.save_for_backward(x, weights)
        return swiglu_forward(x, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        from slime.ops.kernels.experts import swiglu_backward

        return swiglu_backward(grads[0].contiguous(), *ctx.saved_tensors)
