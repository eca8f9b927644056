"""Triton kernels for MLPs: SwiGLU, and for MoE layers the sum of each token's rows and SwiGLU with weights.

Rows are contiguous. Offsets are 64-bit, because the rows of a layer can have more than 2^31 entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDEST = 1024
"""Maximum number of entries of a row that a program processes per iteration."""


@triton.jit
def _sum_slots(y, slots, out, size, topk: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < size
    total = tl.zeros([block], dtype=tl.float32)
    for k in range(topk):
        row = tl.load(slots + token * topk + k).to(tl.int64)
        total += tl.load(y + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_forward(x, weights, out, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < size
    kind = out.dtype.element_ty
    weight = tl.load(weights + row).to(tl.float32)
    gate = tl.load(x + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    product = (silu * value).to(kind).to(tl.float32)
    tl.store(out + row * size + columns, (product * weight).to(kind), mask=inside)


@triton.jit
def _swiglu_backward(grad, x, weights, grad_x, grad_weights, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    kind = grad_x.dtype.element_ty
    weight = tl.load(weights + row).to(tl.float32)
    total = tl.zeros([block], dtype=tl.float32)
    for first in range(0, size, block):
        columns = first + tl.arange(0, block)
        inside = columns < size
        above = tl.load(grad + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(x + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = (gate * sigmoid).to(kind).to(tl.float32)
        product = (silu * value).to(kind).to(tl.float32)
        total += above * product
        inner = above * weight
        grad_gate = inner * value * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(grad_x + row * 2 * size + columns, grad_gate.to(kind), mask=inside)
        tl.store(grad_x + row * 2 * size + size + columns, (inner * silu).to(kind), mask=inside)
    tl.store(grad_weights + row, tl.sum(total, axis=0).to(grad_weights.dtype.element_ty))


def _block(size: int) -> int:
    return min(_WIDEST, triton.next_power_of_2(max(16, size)))


def sum_slots(y: Tensor, slots: Tensor) -> Tensor:
    """y [rows, H], slots [tokens, topk] -> the sum of each token's rows [tokens, H], accumulated in float32."""
    (num_tokens, topk), size = slots.shape, y.size(1)
    if not num_tokens:
        return y.new_zeros(0, size)
    out, block = y.new_empty(num_tokens, size), _block(size)
    _sum_slots[(num_tokens, triton.cdiv(size, block))](y, slots, out, size, topk=topk, block=block)
    return out


def swiglu_forward(x: Tensor, weights: Tensor) -> Tensor:
    """x [rows, 2F], weights [rows] -> [rows, F]."""
    num_rows, size = x.size(0), x.size(1) // 2
    out, block = x.new_empty(num_rows, size), _block(size)
    if num_rows:
        _swiglu_forward[(num_rows, triton.cdiv(size, block))](x, weights, out, size, block=block)
    return out


def swiglu_backward(grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """grad [rows, F] and the inputs of the forward pass -> the gradients of x and of the weights."""
    size = x.size(1) // 2
    grad_x, grad_weights = torch.empty_like(x), torch.empty_like(weights)
    if x.size(0):
        _swiglu_backward[(x.size(0),)](grad, x, weights, grad_x, grad_weights, size, block=_block(size))
    return grad_x, grad_weights


_BLOCK = 1024
"""Entries of a row that a program of `gated_forward` and `gated_backward` processes."""


def gated_forward(mixed: Tensor) -> Tensor:
    """mixed [T, 2 F], contiguous -> [T, F]."""
    num_rows, size = mixed.size(0), mixed.size(1) // 2
    out = torch.empty((num_rows, size), dtype=mixed.dtype, device=mixed.device)
    if out.numel():
        _gated_forward[(num_rows, triton.cdiv(size, _BLOCK))](mixed, out, size, _BLOCK, num_warps=4)
    return out


def gated_backward(grad: Tensor, mixed: Tensor) -> Tensor:
    """grad [T, F] and mixed [T, 2 F], contiguous -> the gradient of `mixed`."""
    num_rows, size = grad.shape
    out = torch.empty_like(mixed)
    if grad.numel():
        _gated_backward[(num_rows, triton.cdiv(size, _BLOCK))](grad, mixed, out, size, _BLOCK, num_warps=4)
    return out


@triton.jit
def _gated_forward(mixed, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(mixed + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(mixed + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * size + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(grad, mixed, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
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
