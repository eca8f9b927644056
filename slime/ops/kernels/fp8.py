"""Kernels that quantise to e4m3 with scales per 128 entries. Layouts are those that DeepGEMM reads without a copy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 128
_ROWS = 32
"""Rows of one program of `by_rows`."""
_ALIGNED = 4
"""Columns of the scales start at multiples of 16 bytes."""


def by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes [T, K] and scales [T, ceil(K / 128)], whose columns are contiguous."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, size = x.shape
    groups, stride = triton.cdiv(size, GROUP), triton.cdiv(num_rows, _ALIGNED) * _ALIGNED
    codes = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((groups, stride), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_rows, _ROWS), groups)
    _by_rows[grid](x, codes, scales, num_rows, size, x.stride(0), stride, _ROWS, GROUP, num_warps=4)
    return codes, scales.t()[:num_rows]


def by_blocks(weight: Tensor, *, transposed: bool) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> codes [N, K] and scales [ceil(N / 128), ceil(K / 128)], or both transposed."""
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    rows, columns = weight.shape
    shape = triton.cdiv(rows, GROUP), triton.cdiv(columns, GROUP)
    order = (1, 0) if transposed else (0, 1)
    codes = torch.empty([weight.shape[i] for i in order], dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty([shape[i] for i in order], dtype=torch.float32, device=weight.device)
    _by_blocks[shape](weight, codes, scales, rows, columns, weight.stride(0), transposed, GROUP, num_warps=8)
    return codes, scales


@triton.jit
def _by_rows(x, codes, scales, num_rows, size, x_stride, stride, ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1).to(tl.int64)
    columns = group * GROUP + tl.arange(0, GROUP)
    inside = (rows < num_rows)[:, None] & (columns < size)[None, :]
    entries = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(entries), axis=1), 2.0**-90) * (1.0 / 448.0)
    result = tl.div_rn(entries, tl.broadcast_to(scale[:, None], entries.shape))
    tl.store(codes + rows[:, None] * size + columns[None, :], result.to(tl.float8e4nv), mask=inside)
    tl.store(scales + group * stride + rows, scale, mask=rows < num_rows)


@triton.jit
def _by_blocks(weight, codes, scales, num_rows, size, w_stride, TRANSPOSED: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    block_row, block_column = tl.program_id(0), tl.program_id(1)
    rows = block_row.to(tl.int64) * GROUP + tl.arange(0, GROUP)
    columns = block_column.to(tl.int64) * GROUP + tl.arange(0, GROUP)
    inside = (rows < num_rows)[:, None] & (columns < size)[None, :]
    entries = tl.load(weight + rows[:, None] * w_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.max(tl.abs(entries), axis=1), axis=0), 1e-4) * (1.0 / 448.0)
    result = tl.div_rn(entries, tl.zeros_like(entries) + scale).to(tl.float8e4nv)
    if TRANSPOSED:
        tl.store(codes + columns[:, None] * num_rows + rows[None, :], tl.trans(result), mask=tl.trans(inside))
        tl.store(scales + block_column * tl.num_programs(0) + block_row, scale)
    else:
        tl.store(codes + rows[:, None] * size + columns[None, :], result, mask=inside)
        tl.store(scales + block_row * tl.num_programs(1) + block_column, scale)
