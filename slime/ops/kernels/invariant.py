"""Kernels of `slime.ops.invariant`: products of few rows, attention over packed rows or an engine's cache, and
normalizers of logits.

An attention tile holds the query heads that share a key head, for several tokens. All tiles have at least 64 rows, so
that Hopper computes them with the same instruction (wgmma) for a decode step of one token as for a long sequence. Tiles
of 16 or 32 rows use another instruction, which rounds differently.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.ops.invariant import KEYS_AT_ONCE

_LOG2_E = 1.4426950408889634
_KEYS = tl.constexpr(KEYS_AT_ONCE)
_LN_2 = tl.constexpr(0.6931471805599453)
_FEW_ROWS = (64, 4, 3)
"""Rows, warps and stages of a tile. With few rows, as in a decode step, smaller tiles leave fewer rows empty."""
_MANY_ROWS = (128, 8, 3)
_VOCABULARY_BLOCK = 8192
_VOCABULARY = 32768
"""With at least this many columns, a product has enough tiles to fill a GPU."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] @ weight [N, K].T -> [M, N], for few rows. Each entry is one sum over K, in blocks, in float32."""
    (num_rows, size), num_columns = x.shape, weight.size(0)
    x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    rows, columns, block = (16, 64, 128) if num_rows <= 16 else (64, 32, 128)
    if num_columns >= _VOCABULARY:
        columns, block = 64, 128 if rows == 16 else 64
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns))
    _product[grid](
        *(x, weight, out, num_rows, num_columns, size, x.stride(0), weight.stride(0), out.stride(0)),
        *(size % block == 0, rows, columns, block),
        num_warps=4,
        num_stages=4,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _product(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    num_rows,
    num_columns,
    size,
    x_stride,
    weight_stride,
    out_stride,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    k = tl.arange(0, BLOCK)
    left = x + (rows % num_rows)[:, None] * x_stride + k[None, :]
    right = weight + (columns % num_columns)[None, :] * weight_stride + k[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, size, BLOCK):
        if EVEN:
            a = tl.load(left)
            b = tl.load(right)
        else:
            a = tl.load(left, mask=(start + k < size)[None, :], other=0.0)
            b = tl.load(right, mask=(start + k < size)[:, None], other=0.0)
        total = tl.dot(a, b, total)
        left += BLOCK
        right += BLOCK
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(out + rows[:, None] * out_stride + columns[None, :], total.to(out.dtype.element_ty), mask=inside)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    cu_query: Tensor,
    cu_key: Tensor | None,
    longest_query: int,
    scale: float,
    *,
    log_totals: Tensor | None = None,
    cache: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Writes causal attention of N sequences to `out` [T, heads, d] (and the log of each softmax's sum [heads, T]).

    query and `out` [T, heads, d], key and value [K, groups, d] with contiguous heads; `cu_query`, `cu_key` [N + 1]. The
    last query of a sequence is aligned with its last key. `cache`: (keys and values [slots, groups, d], starts [N + 1],
    slots): keys that precede a sequence's own keys are in the cache, at slots[starts[i] : starts[i + 1]]. If `cu_key`
    is None, all keys are in the cache.
    """
    num_sequences = cu_query.numel() - 1
    if not num_sequences or not longest_query:
        return
    groups, repeats = key.size(1), query.size(1) // key.size(1)
    query = query.contiguous()
    assert all(x.is_contiguous() for x in (out, *(cache[:2] if cache else ()))), "out and the cache must be contiguous"
    rows, warps, stages = _FEW_ROWS if longest_query * repeats <= 64 else _MANY_ROWS
    cached = cache if cache is not None else (key, value, cu_query, cu_query)
    _attend[(triton.cdiv(longest_query * repeats, rows), groups, num_sequences)](
        *(query, key, value, cached[0], cached[1], out, log_totals, cu_query, cu_key, cached[2], cached[3]),
        scale * _LOG2_E,
        *key.stride()[:2],
        *value.stride()[:2],
        repeats,
        query.size(-1),
        triton.next_power_of_2(query.size(-1)),
        cache is not None,
        cu_key is not None,
        log_totals is not None,
        rows,
        num_warps=warps,
        num_stages=stages,
    )


@triton.jit
def _span(starts, i, given: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the start and length of sequence i; 0 and 0 if there are no starts."""
    first, num = 0, 0
    if given:
        first = tl.load(starts + i)
        num = (tl.load(starts + i + 1) - first).to(tl.int32)
    return first, num


@triton.jit
def _rows(x, at, stride, there, d, inside):  # type: ignore[no-untyped-def]
    """Loads rows `at` [n] of x -> [n, width], with zeros where `there` is false."""
    return tl.load(x + at[:, None] * stride + d[None, :], mask=there[:, None] & inside[None, :], other=0.0)


@triton.jit
def _columns(x, at, stride, there, d, inside):  # type: ignore[no-untyped-def]
    """Loads rows `at` [n] of x, transposed -> [width, n]."""
    return tl.load(x + at[None, :] * stride + d[:, None], mask=there[None, :] & inside[:, None], other=0.0)


@triton.jit
def _fold(q, k, v, scale, seen, top, total, result):  # type: ignore[no-untyped-def]
    """Adds a block of keys to the softmax of each query, and its values to the result."""
    scores = tl.where(seen, tl.dot(q, k) * scale, -float("inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None])
    kept = tl.exp2(top - highest)
    return highest, total * kept + tl.sum(weights, 1), tl.dot(weights.to(v.dtype), v, result * kept[:, None])


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    cached_key,
    cached_value,
    out,
    log_totals,
    cu_query,
    cu_key,
    cache_starts,
    slots,
    scale,
    key_stride,
    key_head,
    value_stride,
    value_head,
    REPEATS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CACHED: tl.constexpr,
    OWN: tl.constexpr,
    LOG_TOTALS: tl.constexpr,
    ROWS: tl.constexpr,
):
    tile, group, sequence, groups = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    first_query, num_queries = _span(cu_query, sequence, True)
    if tile * ROWS >= num_queries * REPEATS:
        return
    first_slot, num_cached = _span(cache_starts, sequence, CACHED)
    first_own, num_own = _span(cu_key, sequence, OWN)
    row, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token, head = row // REPEATS, group * REPEATS + row % REPEATS
    real, inside, at = token < num_queries, d < SIZE, (first_query + token).to(tl.int64)
    written = real[:, None] & inside[None, :]
    place = (at * groups * REPEATS + head)[:, None] * SIZE + d[None, :]
    q = tl.load(query + place, mask=written, other=0.0)
    before = num_cached + num_own - num_queries
    end = before + tl.minimum(num_queries, (tile * ROWS + ROWS - 1) // REPEATS + 1)
    top, total = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, end, _KEYS):
        n = start + tl.arange(0, _KEYS)
        if CACHED:
            slot = tl.load(slots + first_slot + n, mask=n < num_cached, other=0).to(tl.int64) * groups + group
            k = _columns(cached_key, slot, SIZE, n < num_cached, d, inside)
            v = _rows(cached_value, slot, SIZE, n < num_cached, d, inside)
        if OWN:
            own, there = (first_own + n - num_cached).to(tl.int64), (n >= num_cached) & (n < end)
            own_k = _columns(key + group * key_head, own, key_stride, there, d, inside)
            own_v = _rows(value + group * value_head, own, value_stride, there, d, inside)
            k = tl.where(there[None, :], own_k, k) if CACHED else own_k
            v = tl.where(there[:, None], own_v, v) if CACHED else own_v
        top, total, result = _fold(q, k, v, scale, n[None, :] <= (before + token)[:, None], top, total, result)
    tl.store(out + place, (result / total[:, None]).to(out.dtype.element_ty), mask=written)
    if LOG_TOTALS:
        num_tokens = tl.load(cu_query + tl.num_programs(2)).to(tl.int64)
        tl.store(log_totals + head * num_tokens + at, (top + tl.log2(total)) * _LN_2, mask=real)


def log_totals(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """logits [n, V] with contiguous rows, temperatures float32 [n] or [1] -> highest z and log sum [n]."""
    num_rows, size = logits.shape
    top, log_total = (torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if num_rows:
        temperatures = temperatures.view(-1)
        _log_totals[(num_rows,)](
            *(logits, temperatures, top, log_total, logits.stride(0), size, temperatures.numel() > 1),
            _VOCABULARY_BLOCK,
            num_warps=8,
        )
    return top, log_total


@triton.jit
def _log_totals(  # type: ignore[no-untyped-def]
    logits, temperatures, tops, log_totals, stride, size, SEVERAL: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + (row if SEVERAL else 0))
    columns = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, size, BLOCK):
        raw = tl.load(logits + row * stride + start + columns, mask=start + columns < size, other=-float("inf"))
        highest = tl.maximum(highest, tl.div_rn(raw.to(tl.float32), temperature))
    top = tl.max(highest, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        raw = tl.load(logits + row * stride + start + columns, mask=start + columns < size, other=-float("inf"))
        total += tl.exp(tl.div_rn(raw.to(tl.float32), temperature) - top)
    tl.store(tops + row, top)
    tl.store(log_totals + row, tl.log(tl.sum(total, 0)))
