"""A kernel that sums the rows of a float32 matrix: the second half of a weight's gradient, in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS, _ROWS = 32, 128


def column_sums(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """partial [P, N] float32, contiguous -> its column sums [N] in `dtype`, added up in float32."""
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
