"""Kernels of the gated delta rule over chunks of 64 tokens, forward and backward. See `ops.delta_rule`.

For one chunk and head, with unit keys K [64, d_k], scaled queries Q, rates beta, the running sum G of the log decay, S
the state before the chunk, D[t, i] = e^(G[t] - G[i]) for i <= t and L = G[last] - G:

    X = (I + A)^-1    A = beta D (K K^T) below the diagonal      W = X (beta e^G K)    U = X (beta V)
    N = U - W S       S' = e^G[last] S + (e^L K)^T N             O = (e^G Q) S + P N   P = D (Q K^T)

One program computes a tile, which is one chunk of one head, except in `_states` and `_back_states`, where a program
loops over the chunks of a sequence for a block of columns of the state. The gradients, given dO and dS', are

    dN = P^T dO + e^L K dS'    dS = e^G[last] dS' + (e^G Q)^T dO - W^T dN    B = X^T dN    dA = -B N^T    dP = dO N^T
    dV = beta B    dQ = e^G dO S^T + (dP D) K
    dK = (dP D)^T Q + (C + C^T) K - beta e^G B S^T + e^L N dS'^T    with C = beta D dA

Inputs and outputs are [T, h, d] in the model's dtype. Everything else is float32, in consecutive contiguous tiles.
Products whose operands both come from the inputs are exact up to the order of the sums. For the others, PRECISION
sets how float32 operands are multiplied: the error of "tf32x3" is like float32's, of "bf16x3" about 2^-16, and of
"tf32" about 2^-11.

A computed tile is never transposed in registers, because the compiler transposes some of them wrongly on Hopper GPUs
(flash-linear-attention issue 640): it is computed transposed, or stored and loaded in the other order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.ops.delta_rule import CHUNK

_C = tl.constexpr(CHUNK)
_ROWS = tl.constexpr(4)
"""Number of values per token and head that all kernels need: G, the scales of key and query, and beta."""
LAUNCH: dict[str, dict[str, int]] = {
    "prepare": {"num_warps": 4, "num_stages": 1},
    "states": {"BLOCK": 32, "num_warps": 4, "num_stages": 2},
    "outputs": {"BLOCK": 64, "num_warps": 4, "num_stages": 1},
    "back_local": {"BLOCK": 64, "num_warps": 4, "num_stages": 1},
    "back_states": {"BLOCK": 32, "num_warps": 4, "num_stages": 2},
    "back_system": {"BLOCK": 64, "num_warps": 4, "num_stages": 1},
    "back_queries": {"BLOCK": 64, "num_warps": 8, "num_stages": 1},
    "back_keys": {"BLOCK": 64, "num_warps": 8, "num_stages": 1},
}
"""Columns of a state per program or step, warps and stages of each kernel.

Not every choice is safe. On Hopper, ptxas 12.8 (Triton 3.6) computes the address of some operands in shared memory from
a register that was never set, which causes an illegal memory access. This happens in many cases where an operand has
fewer than 64 columns: heads of 16 or 32, and 32 columns of a state in `back_keys`, `back_system`, or one stage of
`back_states`.
"""


class Tiles(NamedTuple):
    """Positions of the M chunks of a packed row, in row order. All int32."""

    start: Tensor
    """[M] first token."""
    filled: Tensor
    """[M] number of tokens, 1 to `CHUNK`."""
    begin: Tensor
    """[N + 1] the first chunk of each sequence, and M."""


class Saved(NamedTuple):
    """Results of the forward pass that the backward pass needs. All float32."""

    rows: Tensor
    """[M, h, 4, CHUNK]"""
    inverse: Tensor
    """X [M, h, CHUNK, CHUNK]"""
    bound: Tensor
    """W [M, h, CHUNK, d_k]"""
    fresh: Tensor
    """N [M, h, CHUNK, d_v]"""
    states: Tensor
    """S [M, h, d_k, d_v]"""


def _settings(name: str, heads: int, d_k: int, d_v: int, precision: str | None) -> dict[str, Any]:
    chosen: dict[str, Any] = dict(LAUNCH[name])
    if "BLOCK" in chosen:
        chosen["BLOCK"] = min(chosen["BLOCK"], d_v)
    return {"H": heads, "DK": d_k, "DV": d_v} | chosen | ({} if precision is None else {"PRECISION": precision})


def forward(inputs: tuple[Tensor, ...], tiles: Tiles, precision: str) -> tuple[Tensor, Saved]:
    """q, k [T, h, d_k], v [T, h, d_v], g, beta [T, h], all contiguous -> [T, h, d_v], dtype of `v`."""
    q, k, v, g, beta = inputs
    heads, d_k, d_v, num = q.size(1), q.size(2), v.size(2), tiles.start.numel()

    def tile(*shape: int) -> Tensor:
        return torch.empty((num, heads, *shape), dtype=torch.float32, device=q.device)

    saved = Saved(tile(4, CHUNK), tile(CHUNK, CHUNK), tile(CHUNK, d_k), tile(CHUNK, d_v), tile(d_k, d_v))
    out = torch.empty_like(v)
    places, sizes = (tiles.start, tiles.filled), (heads, d_k, d_v)
    if not num:
        return out, saved
    _prepare[(num * heads,)](
        *(q, k, v, g, beta, *places, saved.rows, saved.inverse, saved.bound, saved.fresh),
        **_settings("prepare", *sizes, precision),
    )
    settings = _settings("states", *sizes, precision)
    _states[(d_v // settings["BLOCK"], heads, tiles.begin.numel() - 1)](
        *(k, *places, tiles.begin, saved.rows, saved.bound, saved.fresh, saved.states), **settings
    )
    _outputs[(num * heads,)](
        *(q, k, *places, saved.rows, saved.fresh, saved.states, out), **_settings("outputs", *sizes, precision)
    )
    return out, saved


def backward(inputs: tuple[Tensor, ...], tiles: Tiles, saved: Saved, precision: str) -> tuple[Tensor, ...]:
    """The gradient [T, h, d_v], q, k and v, contiguous -> gradients of q, k, v, and of g, beta [T, h] in float32."""
    grad, q, k, v = inputs
    heads, d_k, d_v, num = q.size(1), q.size(2), v.size(2), tiles.start.numel()
    places, sizes = (tiles.start, tiles.filled), (heads, d_k, d_v)
    of_q, of_k, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    of_g, of_beta = (torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2))
    if not num:
        return of_q, of_k, of_v, of_g, of_beta
    change, back = torch.empty_like(saved.fresh), torch.empty_like(saved.states)
    of_system, of_scores = torch.empty_like(saved.inverse), torch.empty_like(saved.inverse)
    sums = torch.empty_like(saved.rows[:, :, :2])
    _back_local[(num * heads,)](
        *(grad, q, k, *places, saved.rows, change), **_settings("back_local", *sizes, precision)
    )
    settings = _settings("back_states", *sizes, precision)
    _back_states[(d_v // settings["BLOCK"], heads, tiles.begin.numel() - 1)](
        *(grad, q, k, *places, tiles.begin, saved.rows, saved.bound, change, back), **settings
    )
    _back_system[(num * heads,)](
        *(grad, q, k, v, *places, saved.rows, saved.inverse, saved.fresh, change, of_system, of_scores, of_v, sums),
        **_settings("back_system", *sizes, precision),
    )
    _back_queries[(num * heads,)](
        *(grad, q, k, *places, saved.rows, saved.states, of_scores, of_q, sums),
        **_settings("back_queries", *sizes, precision),
    )
    _back_keys[(num * heads,)](
        *(q, k, *places, saved.rows, saved.fresh, saved.states, change, back, of_system, of_scores, sums),
        *(of_k, of_g, of_beta),
        **_settings("back_keys", *sizes, precision),
    )
    return of_q, of_k, of_v, of_g, of_beta


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """a @ b in float32. Operands in bfloat16 are exact."""
    if a.dtype == b.dtype and a.dtype != tl.float32 and PRECISION != "ieee":
        total = tl.dot(a, b)
    elif PRECISION == "bf16x3":
        high = b.to(tl.bfloat16)
        low = (b.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
        first = a.to(tl.bfloat16)
        if a.dtype == tl.bfloat16:
            total = tl.dot(first, low)
            total = tl.dot(first, high, total)
        else:
            rest = (a.to(tl.float32) - first.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(rest, high)
            if b.dtype != tl.bfloat16:
                total = tl.dot(first, low, total)
            total = tl.dot(first, high, total)
    else:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return total


@triton.jit
def _tokens(start, count, tile, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the rows of a tile in [T * h, d] and which of them are tokens, both [CHUNK]."""
    slot = tl.arange(0, _C)
    first = tl.load(start + tile // H).to(tl.int64)
    return (first + slot) * H + tile % H, slot < tl.load(count + tile // H)


@triton.jit
def _sequence(start, count, begin):  # type: ignore[no-untyped-def]
    """Returns the range of a sequence's chunks (first, last + 1) and the range of its tokens."""
    sequence = tl.program_id(2)
    begins, ends = tl.load(begin + sequence), tl.load(begin + sequence + 1)
    final = tl.load(start + ends - 1) + tl.load(count + ends - 1)
    return begins, ends, tl.load(start + begins), final


@triton.jit
def _load(x, row, kept, first, D: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads columns `first`, ... of some rows of x [..., D] -> [CHUNK, WIDTH] in the dtype of x."""
    return tl.load(x + row[:, None] * D + (first + tl.arange(0, WIDTH))[None, :], mask=kept[:, None], other=0.0)


@triton.jit
def _load_across(x, row, kept, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads some rows of x [..., D] -> [D, CHUNK] in the dtype of x."""
    return tl.load(x + tl.arange(0, D)[:, None] + row[None, :] * D, mask=kept[None, :], other=0.0)


@triton.jit
def _block(first, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns offsets [ROWS, WIDTH] of columns `first`, ... of a contiguous tile [ROWS, D]."""
    return tl.arange(0, ROWS)[:, None] * D + (first + tl.arange(0, WIDTH))[None, :]


@triton.jit
def _block_across(first, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the transpose [WIDTH, ROWS] of `_block`."""
    return tl.arange(0, ROWS)[None, :] * D + (first + tl.arange(0, WIDTH))[:, None]


@triton.jit
def _row(rows, tile, number: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(rows + (tile * _ROWS + number) * _C + tl.arange(0, _C))


@triton.jit
def _growth(late, early, later):  # type: ignore[no-untyped-def]
    """Returns e^(late - early), or zero where `later` is false, because the exponential could overflow there."""
    return tl.exp(tl.where(later, late - early, -float("inf")))


@triton.jit
def _prepare(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    g,
    beta,
    start,
    count,
    rows,
    inverse,
    bound,
    fresh,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes the values per token, X, W, and U (into `fresh`)."""
    tile = tl.program_id(0).to(tl.int64)
    row, kept = _tokens(start, count, tile, H)
    slot = tl.arange(0, _C)
    total = tl.cumsum(tl.load(g + row, mask=kept, other=0.0).to(tl.float32), 0)
    rate = tl.load(beta + row, mask=kept, other=0.0).to(tl.float32)
    wide = _load(q, row, kept, 0, DK, DK).to(tl.float32)
    query_scale = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) * (DK**-0.5)
    keys = _load(k, row, kept, 0, DK, DK)
    wide = keys.to(tl.float32)
    key_scale = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
    at = rows + tile * (_ROWS * _C) + slot
    tl.store(at, total)
    tl.store(at + _C, key_scale)
    tl.store(at + 2 * _C, query_scale)
    tl.store(at + 3 * _C, rate)
    gram = _dot(keys, _load_across(k, row, kept, DK), PRECISION)
    growth = _growth(total[:, None], total[None, :], slot[:, None] > slot[None, :])
    x = _inverse(gram * growth * (rate * key_scale)[:, None] * key_scale[None, :])
    tl.store(inverse + tile * (_C * _C) + _block(0, _C, _C, _C), x)
    x = x * rate[None, :]
    tl.store(fresh + tile * (_C * DV) + _block(0, DV, _C, DV), _dot(x, _load(v, row, kept, 0, DV, DV), PRECISION))
    x = x * (tl.exp(total) * key_scale)[None, :]
    tl.store(bound + tile * (_C * DK) + _block(0, DK, _C, DK), _dot(x, keys, PRECISION))


@triton.jit
def _inverse(system):  # type: ignore[no-untyped-def]
    """Inverts I + `system` [CHUNK, CHUNK], which is zero on and above the diagonal.

    Inverts diagonal blocks and doubles their size in each round: the inverse of [[a, 0], [c, d]] has -d^-1 c a^-1 in
    its lower left. This is as accurate as forward substitution, whereas powers of the system could overflow.
    """
    slot = tl.arange(0, _C)
    across, down = slot[None, :], slot[:, None]
    x = tl.where(across == down, 1.0, tl.where(across >> 1 == down >> 1, -system, 0.0))
    for level in range(1, 6):
        corner = (across >> (level + 1) == down >> (level + 1)) & (across >> level != down >> level)
        half = tl.dot(x, tl.where(corner, system, 0.0), input_precision="tf32x3")
        x -= tl.dot(half, x, input_precision="tf32x3")
    return x


@triton.jit
def _states(  # type: ignore[no-untyped-def]
    k,
    start,
    count,
    begin,
    rows,
    bound,
    fresh,
    states,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes S of all chunks of a sequence and replaces U by N, for BLOCK columns of one head."""
    first = tl.program_id(0) * BLOCK
    begins, ends, token, final = _sequence(start, count, begin)
    token += tl.arange(0, _C)
    state = tl.zeros([DK, BLOCK], tl.float32)
    for chunk in range(begins, ends):
        tile = tl.cast(chunk, tl.int64) * H + tl.program_id(1)
        row, kept = token.to(tl.int64) * H + tl.program_id(1), token < final
        token += _C
        tl.store(states + tile * (DK * DV) + _block(first, DV, DK, BLOCK), state)
        total = _row(rows, tile, 0)
        last = tl.load(rows + tile * (_ROWS * _C) + (_C - 1))
        scale = _row(rows, tile, 1) * tl.exp(last - total)
        w = tl.load(bound + tile * (_C * DK) + _block(0, DK, _C, DK))
        at = fresh + tile * (_C * DV) + _block(first, DV, _C, BLOCK)
        n = tl.load(at) - _dot(w, state, PRECISION)
        tl.store(at, n)
        state = state * tl.exp(last) + _dot(_load_across(k, row, kept, DK), n * scale[:, None], PRECISION)


@triton.jit
def _outputs(  # type: ignore[no-untyped-def]
    q,
    k,
    start,
    count,
    rows,
    fresh,
    states,
    out,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes O."""
    tile = tl.program_id(0).to(tl.int64)
    row, kept = _tokens(start, count, tile, H)
    slot = tl.arange(0, _C)
    total, key_scale, query_scale = _row(rows, tile, 0), _row(rows, tile, 1), _row(rows, tile, 2)
    queries = _load(q, row, kept, 0, DK, DK)
    growth = _growth(total[:, None], total[None, :], slot[:, None] >= slot[None, :])
    scores = _dot(queries, _load_across(k, row, kept, DK), PRECISION)
    scores = scores * growth * query_scale[:, None] * key_scale[None, :]
    scale = tl.exp(total) * query_scale
    for first in range(0, DV, BLOCK):
        state = tl.load(states + tile * (DK * DV) + _block(first, DV, DK, BLOCK))
        n = tl.load(fresh + tile * (_C * DV) + _block(first, DV, _C, BLOCK))
        result = _dot(queries, state, PRECISION) * scale[:, None] + _dot(scores, n, PRECISION)
        at = out + row[:, None] * DV + (first + tl.arange(0, BLOCK))[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=kept[:, None])


@triton.jit
def _back_local(  # type: ignore[no-untyped-def]
    grad,
    q,
    k,
    start,
    count,
    rows,
    change,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes P^T dO, the part of dN that does not depend on later chunks."""
    tile = tl.program_id(0).to(tl.int64)
    row, kept = _tokens(start, count, tile, H)
    slot = tl.arange(0, _C)
    total, key_scale, query_scale = _row(rows, tile, 0), _row(rows, tile, 1), _row(rows, tile, 2)
    growth = _growth(total[None, :], total[:, None], slot[:, None] <= slot[None, :])
    scores = _dot(_load(k, row, kept, 0, DK, DK), _load_across(q, row, kept, DK), PRECISION)
    scores = scores * growth * key_scale[:, None] * query_scale[None, :]
    for first in range(0, DV, BLOCK):
        part = _dot(scores, _load(grad, row, kept, first, DV, BLOCK), PRECISION)
        tl.store(change + tile * (_C * DV) + _block(first, DV, _C, BLOCK), part)


@triton.jit
def _back_states(  # type: ignore[no-untyped-def]
    grad,
    q,
    k,
    start,
    count,
    begin,
    rows,
    bound,
    change,
    back,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes dS' of all chunks of a sequence and completes dN, for BLOCK columns of one head."""
    first = tl.program_id(0) * BLOCK
    begins, ends, token, final = _sequence(start, count, begin)
    token += (ends - begins - 1) * _C + tl.arange(0, _C)
    above = tl.zeros([DK, BLOCK], tl.float32)
    for number in range(0, ends - begins):
        tile = tl.cast(ends - 1 - number, tl.int64) * H + tl.program_id(1)
        row, kept = token.to(tl.int64) * H + tl.program_id(1), token < final
        token -= _C
        tl.store(back + tile * (DK * DV) + _block(first, DV, DK, BLOCK), above)
        total = _row(rows, tile, 0)
        last = tl.load(rows + tile * (_ROWS * _C) + (_C - 1))
        scale = _row(rows, tile, 1) * tl.exp(last - total)
        at = change + tile * (_C * DV) + _block(first, DV, _C, BLOCK)
        n = tl.load(at) + _dot(_load(k, row, kept, 0, DK, DK), above, PRECISION) * scale[:, None]
        tl.store(at, n)
        of_out = _load(grad, row, kept, first, DV, BLOCK) * (_row(rows, tile, 2) * tl.exp(total))[:, None]
        w = tl.load(bound + tile * (_C * DK) + _block_across(0, DK, _C, DK))
        above = above * tl.exp(last) + _dot(_load_across(q, row, kept, DK), of_out, PRECISION)
        above -= _dot(w, n, PRECISION)


@triton.jit
def _back_system(  # type: ignore[no-untyped-def]
    grad,
    q,
    k,
    v,
    start,
    count,
    rows,
    inverse,
    fresh,
    change,
    of_system,
    of_scores,
    of_v,
    sums,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Replaces dN by B, and computes dV, C, dP D, and the parts of dG and dbeta that come from A, P and V."""
    tile = tl.program_id(0).to(tl.int64)
    row, kept = _tokens(start, count, tile, H)
    slot = tl.arange(0, _C)
    rate = _row(rows, tile, 3)
    x = tl.load(inverse + tile * (_C * _C) + _block_across(0, _C, _C, _C))
    of_a = tl.zeros([_C, _C], tl.float32)
    of_p = tl.zeros([_C, _C], tl.float32)
    of_rate = tl.zeros([_C], tl.float32)
    for first in range(0, DV, BLOCK):
        at = change + tile * (_C * DV) + _block(first, DV, _C, BLOCK)
        b = _dot(x, tl.load(at), PRECISION)
        tl.store(at, b)
        into = of_v + row[:, None] * DV + (first + tl.arange(0, BLOCK))[None, :]
        tl.store(into, (b * rate[:, None]).to(of_v.dtype.element_ty), mask=kept[:, None])
        of_rate += tl.sum(b * _load(v, row, kept, first, DV, BLOCK).to(tl.float32), 1)
        n = tl.load(fresh + tile * (_C * DV) + _block_across(first, DV, _C, BLOCK))
        of_a -= _dot(b, n, PRECISION)
        of_p += _dot(_load(grad, row, kept, first, DV, BLOCK), n, PRECISION)
    total, key_scale = _row(rows, tile, 0), _row(rows, tile, 1)
    growth = _growth(total[:, None], total[None, :], slot[:, None] >= slot[None, :])
    keys = _load_across(k, row, kept, DK)
    at = tile * (_C * _C) + _block(0, _C, _C, _C)
    of_p *= growth
    tl.store(of_scores + at, of_p)
    of_p *= _dot(_load(q, row, kept, 0, DK, DK), keys, PRECISION) * _row(rows, tile, 2)[:, None] * key_scale[None, :]
    of_a = tl.where(slot[:, None] > slot[None, :], of_a * growth, 0.0)
    tl.store(of_system + at, of_a * rate[:, None])
    of_a *= _dot(_load(k, row, kept, 0, DK, DK), keys, PRECISION) * key_scale[:, None] * key_scale[None, :]
    tl.store(sums + (2 * tile + 1) * _C + slot, of_rate + tl.sum(of_a, 1))
    of_p = tl.where(slot[:, None] > slot[None, :], of_p + of_a * rate[:, None], 0.0)  # the diagonal cancels
    tl.store(sums + 2 * tile * _C + slot, tl.sum(of_p, 1) - tl.sum(of_p, 0))


@triton.jit
def _back_queries(  # type: ignore[no-untyped-def]
    grad,
    q,
    k,
    start,
    count,
    rows,
    states,
    of_scores,
    of_q,
    sums,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes dQ and from it the gradient of the queries before normalisation; adds its part of dG."""
    tile = tl.program_id(0).to(tl.int64)
    row, kept = _tokens(start, count, tile, H)
    slot = tl.arange(0, _C)
    scale = _row(rows, tile, 2)
    through = tl.zeros([_C, DK], tl.float32)
    for first in range(0, DV, BLOCK):
        state = tl.load(states + tile * (DK * DV) + _block_across(first, DV, DK, BLOCK))
        through += _dot(_load(grad, row, kept, first, DV, BLOCK), state, PRECISION)
    through *= tl.exp(_row(rows, tile, 0))[:, None]
    unit = _load(q, row, kept, 0, DK, DK).to(tl.float32) * scale[:, None]
    at = sums + 2 * tile * _C + slot
    tl.store(at, tl.load(at) + tl.sum(unit * through, 1))
    scores = tl.load(of_scores + tile * (_C * _C) + _block(0, _C, _C, _C)) * _row(rows, tile, 1)[None, :]
    through += _dot(scores, _load(k, row, kept, 0, DK, DK), PRECISION)
    result = (through - unit * (tl.sum(unit * through, 1) * DK)[:, None]) * scale[:, None]
    into = of_q + row[:, None] * DK + tl.arange(0, DK)[None, :]
    tl.store(into, result.to(of_q.dtype.element_ty), mask=kept[:, None])


@triton.jit
def _through_states(x, states, tile, DK: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """x @ states^T of a tile, [CHUNK, d_k], for x [CHUNK, d_v]."""
    total = tl.zeros([_C, DK], tl.float32)
    for first in range(0, DV, BLOCK):
        state = tl.load(states + tile * (DK * DV) + _block_across(first, DV, DK, BLOCK))
        total += _dot(tl.load(x + tile * (_C * DV) + _block(first, DV, _C, BLOCK)), state, PRECISION)
    return total


@triton.jit
def _back_keys(  # type: ignore[no-untyped-def]
    q,
    k,
    start,
    count,
    rows,
    fresh,
    states,
    change,
    back,
    of_system,
    of_scores,
    sums,
    of_k,
    of_g,
    of_beta,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes dK and from it the gradient of the keys before normalisation; completes the gradients of g and beta."""
    tile = tl.program_id(0).to(tl.int64)
    row, kept = _tokens(start, count, tile, H)
    slot = tl.arange(0, _C)
    total, scale, rate = _row(rows, tile, 0), _row(rows, tile, 1), _row(rows, tile, 3)
    last = tl.load(rows + tile * (_ROWS * _C) + (_C - 1))
    keys = _load(k, row, kept, 0, DK, DK)
    unit = keys.to(tl.float32) * scale[:, None]
    square = tile * (_C * _C)
    system = tl.load(of_system + square + _block(0, _C, _C, _C))
    system += tl.load(of_system + square + _block_across(0, _C, _C, _C))
    result = _dot(system * scale[None, :], keys, PRECISION)
    scores = tl.load(of_scores + square + _block_across(0, _C, _C, _C)) * _row(rows, tile, 2)[None, :]
    result += _dot(scores, _load(q, row, kept, 0, DK, DK), PRECISION)
    part = _through_states(change, states, tile, DK, DV, BLOCK, PRECISION) * tl.exp(total)[:, None]
    of_rate = -tl.sum(unit * part, 1)
    result -= part * rate[:, None]
    tl.store(of_beta + row, tl.load(sums + (2 * tile + 1) * _C + slot) + of_rate, mask=kept)
    part = _through_states(fresh, back, tile, DK, DV, BLOCK, PRECISION) * tl.exp(last - total)[:, None]
    result += part
    lost = tl.sum(unit * part, 1)
    kept_state = tl.zeros([DK], tl.float32)
    for first in range(0, DV, BLOCK):
        at = tile * (DK * DV) + _block(first, DV, DK, BLOCK)
        kept_state += tl.sum(tl.load(states + at) * tl.load(back + at), 1)
    of_total = tl.load(sums + 2 * tile * _C + slot) + of_rate * rate
    # a token's decay changes G of that token and of later ones, and L of earlier ones
    of_decay = tl.sum(tl.where(slot[:, None] >= slot[None, :], of_total[:, None], lost[:, None]), 0)
    tl.store(of_g + row, of_decay + tl.exp(last) * tl.sum(kept_state, 0), mask=kept)
    result = (result - unit * tl.sum(unit * result, 1)[:, None]) * scale[:, None]
    tl.store(of_k + row[:, None] * DK + tl.arange(0, DK)[None, :], result.to(of_k.dtype.element_ty), mask=kept[:, None])
