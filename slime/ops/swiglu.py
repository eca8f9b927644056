"""The gated activation of an MLP: silu(gate) * up on a fused projection [gate; up] (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from slime.ops.select import FUSED, name_of


def swiglu(mixed: Tensor) -> Tensor:
    """mixed [..., 2 F] (gates, then values) -> [..., F], in the chosen form."""
    if name_of("swiglu", mixed) == FUSED:
        out: Tensor = FusedSwiGLU.apply(mixed)
        return out
    return reference(mixed)


def reference(mixed: Tensor) -> Tensor:
    gate, up = mixed.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


class FusedSwiGLU(torch.autograd.Function):
    """One forward and one backward kernel, both in float32."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor) -> Tensor:
        kernels: Any = importlib.import_module("slime.ops.kernels.mlp")
        mixed = mixed.contiguous()
        ctx.save_for_backward(mixed)
        out: Tensor = kernels.gated_forward(mixed.view(-1, mixed.size(-1)))
        return out.view(*mixed.shape[:-1], mixed.size(-1) // 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        kernels: Any = importlib.import_module("slime.ops.kernels.mlp")
        (mixed,), (grad,) = ctx.saved_tensors, grads
        out: Tensor = kernels.gated_backward(
            grad.reshape(-1, grad.size(-1)).contiguous(), mixed.view(-1, mixed.size(-1))
        )
        return out.view(mixed.shape)
