"""RMSNorm kernels, and kernels that sum rows in float32 in a fixed order.

Each norm program processes tiles of complete rows, so a row must fit in registers. In the backward kernel, each
program processes some of the rows and stores a partial gradient of the weight. `column_sums` adds up the partial
gradients without atomics, so the result is bitwise deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
"""Number of entries per tile. If rows are longer, a tile is one row."""
_LONGEST = 32768
"""Maximum row length, in entries."""


def _tile(size: int) -> tuple[int, int, int]:
    """Returns the rows and columns per tile and the number of warps, for rows of `size` entries."""
    assert 0 < size <= _LONGEST, f"rows have {size} entries, but the kernel supports at most {_LONGEST}"
    columns = triton.next_power_of_2(size)
    rows = max(1, _TILE // columns)
    return rows, columns, min(16, max(4, rows * columns // 512))


def forward(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [T, H] with contiguous rows, weight [H] -> out [T, H], and 1 / root mean square [T] float32.

    With `residual` [T, H], whose rows are contiguous: adds x to it in place, and normalises the sum.
    """
    num_rows, size = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        rows, columns, warps = _tile(size)
        _forward[(triton.cdiv(num_rows, rows),)](
            *(x, residual, weight, out, scale, x.stride(0), 0 if residual is None else residual.stride(0)),
            *(num_rows, eps, size, zero_centered, residual is not None, rows, columns),
            num_warps=warps,
        )
    return out, scale


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_centered: bool,
    *,
    needs_weight: bool,
    num_processors: int,
) -> tuple[Tensor, Tensor | None]:
    """grad and x [T, H], weight [H], scale [T] -> gradients of x [T, H] and, with `needs_weight`, of the weight [H]."""
    num_rows, size = x.shape
    grad, x = (t if t.stride(1) == 1 else t.contiguous() for t in (grad, x))
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out, torch.zeros_like(weight) if needs_weight else None
    rows, columns, warps = _tile(size)
    tiles = triton.cdiv(num_rows, rows)
    # Launch only as many programs as can run concurrently.
    programs = min(tiles, num_processors * max(1, 24 // warps)) if needs_weight else tiles
    partial = torch.empty((programs if needs_weight else 1, size), dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        grad,
        x,
        weight,
        scale,
        out,
        partial,
        grad.stride(0),
        x.stride(0),
        num_rows,
        size,
        zero_centered,
        needs_weight,
        rows,
        columns,
        num_warps=warps,
    )
    return out, column_sums(partial, weight.dtype) if needs_weight else None


@triton.jit(do_not_specialize=["num_rows"])
def _forward(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    out,
    scale,
    stride,
    residual_stride,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    CENTERED: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    kind = out.dtype.element_ty
    wide = tl.load(x + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        place = residual + rows[:, None] * residual_stride + columns[None, :]
        total = (wide + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(place, total, mask=inside)
        wide = total.to(tl.float32)
    w = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)
    normed = wide * inverse[:, None]
    result = normed * (1.0 + w)[None, :] if CENTERED else normed.to(kind).to(tl.float32) * w[None, :]
    tl.store(out + rows[:, None] * SIZE + columns[None, :], result.to(kind), mask=inside)
    tl.store(scale + rows, inverse, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _backward(  # type: ignore[no-untyped-def]
    grad,
    x,
    weight,
    scale,
    out,
    partial,
    grad_stride,
    stride,
    num_rows,
    SIZE: tl.constexpr,
    CENTERED: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = tl.arange(0, COLUMNS)
    kind = out.dtype.element_ty
    w = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    of_weight = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
        g = tl.load(grad + rows[:, None] * grad_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        wide = tl.load(x + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(scale + rows, mask=rows < num_rows, other=0.0)
        normed = wide * inverse[:, None]
        if CENTERED:
            of_normed = g * (1.0 + w)[None, :]
            of_weight += g * normed
        else:
            of_normed = (g * w[None, :]).to(kind).to(tl.float32)
            of_weight += g * normed.to(kind).to(tl.float32)
        mean = tl.sum(of_normed * normed, 1) / SIZE
        of_x = (of_normed - normed * mean[:, None]) * inverse[:, None]
        tl.store(out + rows[:, None] * SIZE + columns[None, :], of_x.to(kind), mask=inside)
    if NEEDS_WEIGHT:
        row = partial + tl.program_id(0).to(tl.int64) * SIZE
        tl.store(row + columns, tl.sum(of_weight, 0), mask=columns < SIZE)


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
