"""Kernels that sum rows in float32 in a fixed order: all rows of a matrix, or the copies of each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS, _ROWS = 32, 128


def column_sums(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """partial [P, N] float32, contiguous -> its column sums [N] in `dtype`, accumulated in float32."""
    num_rows, size = partial.shape
    out = torch.empty(size, dtype=dtype, device=partial.device)
    _column_sums[(triton.cdiv(size, _COLUMNS),)](partial, out, num_rows, size, _ROWS, _COLUMNS, num_warps=8)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _column_sums(partial, out, num_rows, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & (columns < size)[None, :]
        total += tl.load(partial + rows[:, None] * size + columns[None, :], mask=inside, other=0.0)
    tl.store(out + columns, tl.sum(total, 0).to(out.dtype.element_ty), mask=columns < size)


_WIDEST = 1024
"""Maximum number of entries of a row that one program processes."""


@triton.jit
def _sum_repeats(y, order, starts, out, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < size
    total = tl.zeros([block], dtype=tl.float32)
    first = tl.load(starts + row)
    last = tl.load(starts + row + 1)
    for place in range(first, last):
        one = tl.load(order + place).to(tl.int64)
        total += tl.load(y + one * size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, total.to(out.dtype.element_ty), mask=inside)


def sum_repeats(y: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """y [K, n] contiguous, order [K], starts [T + 1] -> the sum of the copies of each row [T, n]."""
    num_rows, size = starts.numel() - 1, y.size(1)
    out = torch.empty(num_rows, size, dtype=y.dtype, device=y.device)
    if num_rows:
        block = min(_WIDEST, triton.next_power_of_2(max(16, size)))
        _sum_repeats[(num_rows, triton.cdiv(size, block))](y, order, starts, out, size, block=block)
    return out
