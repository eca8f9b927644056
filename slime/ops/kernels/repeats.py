"""A Triton kernel that sums what belongs to one row, any number of copies of it, in float32 and in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDEST = 1024
"""Numbers of a row that one program works on."""


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
