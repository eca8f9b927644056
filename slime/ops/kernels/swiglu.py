"""Kernels for silu(gate) * up. A program processes a block of one row. Offsets are 64-bit, to support many rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def forward(mixed: Tensor) -> Tensor:
    """mixed [T, 2 F], contiguous -> [T, F]."""
    num_rows, size = mixed.size(0), mixed.size(1) // 2
    out = torch.empty((num_rows, size), dtype=mixed.dtype, device=mixed.device)
    if out.numel():
        _forward[(num_rows, triton.cdiv(size, _BLOCK))](mixed, out, size, _BLOCK, num_warps=4)
    return out


def backward(grad: Tensor, mixed: Tensor) -> Tensor:
    """grad [T, F] and mixed [T, 2 F], contiguous -> the gradient of `mixed`."""
    num_rows, size = grad.shape
    out = torch.empty_like(mixed)
    if grad.numel():
        _backward[(num_rows, triton.cdiv(size, _BLOCK))](grad, mixed, out, size, _BLOCK, num_warps=4)
    return out


@triton.jit
def _forward(mixed, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(mixed + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(mixed + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * size + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, mixed, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    kind = out.dtype.element_ty
    g = tl.load(grad + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(mixed + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(mixed + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    of_gate = g * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(out + row * 2 * size + columns, of_gate.to(kind), mask=inside)
    tl.store(out + row * 2 * size + size + columns, (g * silu).to(kind), mask=inside)
