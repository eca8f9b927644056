"""Kernels that split a fused projection into heads and normalize and rotate queries and keys, forward and backward.

A program processes one token and loads the token's cos and sin only once. The backward kernel reads the gradients of
queries, keys and values and writes the gradient of the projection. If the norms are trained, each of its programs
processes several tokens and stores partial gradients of the norm weights, which `column_sums` adds up.

A program processes `HEADS` heads at a time, in float32. Each head is split into the first elements of its rotated
pairs, the second elements, and the rest (`places`). A projection has groups of WIDTH heads: head h of COUNT is head
h % PER of group h // PER. NORM is 0 without norms, 1 with norms, and 2 with zero-centered weights.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.ops.kernels.norm import column_sums

HEADS = tl.constexpr(8)
"""Number of heads that a program processes at a time."""


def _sizes(heads: Any, width: int, half: int, *, normed: bool) -> dict[str, Any]:
    """Returns compile-time constants for a projection of `width` entries with `half` rotated pairs per head."""
    rest = heads.size - 2 * half
    assert rest >= 0 and half > 0, f"a head of {heads.size} entries cannot have {half} rotated pairs"
    return {
        "GROUPS": heads.groups,
        "PER": width // (heads.groups * heads.size) - 2,
        "SIZE": heads.size,
        "HALF": half,
        "INTERLEAVED": heads.interleaved,
        "APART": heads.apart,
        "NORM": (2 if heads.zero_centered else 1) if normed else 0,
        "PAIRS": triton.next_power_of_2(half),
        "REST": max(16, triton.next_power_of_2(rest)),
        "num_warps": 4,
    }


def forward(
    mixed: Tensor, heads: Any, cos: Tensor, sin: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `qk_rotary.reference`. `mixed` [T, W] must be contiguous. With norms, or with `heads.apart`, the values
    are a view of it."""
    num_tokens, width = mixed.shape
    normed = q_weight is not None
    sizes = _sizes(heads, width, cos.size(-1), normed=normed)
    query = mixed.new_empty(num_tokens, heads.groups * sizes["PER"], heads.size)
    key = mixed.new_empty(num_tokens, heads.groups, heads.size)
    if heads.apart:
        value = mixed[:, -heads.groups * heads.size :].unflatten(-1, (heads.groups, -1))
    else:
        value = mixed.unflatten(-1, (heads.groups, -1))[..., -heads.size :] if normed else torch.empty_like(key)
    if num_tokens:
        weights = (q_weight, k_weight) if normed else (mixed, mixed)  # not read without norms
        _forward[(num_tokens,)](
            mixed, query, key, value, *weights, cos.contiguous(), sin.contiguous(), heads.eps, **sizes
        )
    return query, key, value


def backward(
    grads: tuple[Tensor, Tensor, Tensor],
    heads: Any,
    width: int,
    cos: Tensor,
    sin: Tensor,
    mixed: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    num_programs: int = 0,
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Contiguous gradients of query, key and value -> gradients of the projection [T, W] and of both norm weights.

    `num_programs` is the number of programs that accumulate weight gradients; 0 skips these gradients.
    """
    assert not heads.apart, "only engines have heads that are apart"
    query, num_tokens = grads[0], grads[0].size(0)
    out = query.new_empty(num_tokens, width)
    normed = mixed is not None
    if not num_tokens:
        none = tuple(torch.zeros_like(w) if w is not None and num_programs else None for w in (q_weight, k_weight))
        return out, (none[0], none[1])
    sizes = _sizes(heads, width, cos.size(-1), normed=normed)
    programs = min(num_programs, num_tokens) or num_tokens
    partial = torch.empty((programs if num_programs else 1, 2, heads.size), dtype=torch.float32, device=query.device)
    saved = (mixed, q_weight, k_weight) if normed else (query, query, query)  # not read without norms
    _backward[(programs,)](
        *grads,
        *saved,
        cos.contiguous(),
        sin.contiguous(),
        out,
        partial,
        num_tokens,
        heads.eps,
        NEEDS_WEIGHTS=num_programs > 0,
        **sizes,
    )
    if not num_programs or q_weight is None:
        return out, (None, None)
    of_query, of_key = column_sums(partial.view(programs, -1), q_weight.dtype).view(2, -1).unbind()
    return out, (of_query, of_key)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    mixed,
    query,
    key,
    value,
    q_weight,
    k_weight,
    cos,
    sin,
    eps,
    NORM: tl.constexpr,
    GROUPS: tl.constexpr,
    PER: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    APART: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    WIDTH: tl.constexpr = PER + 2
    QUERIES: tl.constexpr = PER if APART else WIDTH
    KEYS: tl.constexpr = 1 if APART else WIDTH
    token = tl.program_id(0).to(tl.int64)
    first, second, others = places(SIZE, HALF, INTERLEAVED, PAIRS, REST)
    c, s = angles(cos, sin, token, HALF, PAIRS)
    row = mixed + token * (GROUPS * WIDTH * SIZE)
    out = query + token * (GROUPS * PER * SIZE)
    heads_forward(row, out, q_weight, first, second, others, c, s, eps, GROUPS * PER, PER, QUERIES, SIZE, NORM)
    row += (GROUPS if APART else 1) * PER * SIZE
    out = key + token * (GROUPS * SIZE)
    heads_forward(row, out, k_weight, first, second, others, c, s, eps, GROUPS, 1, KEYS, SIZE, NORM)
    if NORM == 0 and not APART:
        copy_heads(row + SIZE, value + token * (GROUPS * SIZE), WIDTH * SIZE, SIZE, GROUPS, SIZE, PAIRS)


@triton.jit(do_not_specialize=["num_tokens"])
def _backward(  # type: ignore[no-untyped-def]
    of_query,
    of_key,
    of_value,
    mixed,
    q_weight,
    k_weight,
    cos,
    sin,
    out,
    partial,
    num_tokens,
    eps,
    NEEDS_WEIGHTS: tl.constexpr,
    NORM: tl.constexpr,
    GROUPS: tl.constexpr,
    PER: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    APART: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    WIDTH: tl.constexpr = PER + 2
    HEADS: tl.constexpr = GROUPS * PER
    first, second, others = places(SIZE, HALF, INTERLEAVED, PAIRS, REST)
    q1, q2, q3 = zero_sums(PAIRS, REST)
    k1, k2, k3 = zero_sums(PAIRS, REST)
    for number in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        token = tl.cast(number, tl.int64)
        c, s = angles(cos, sin, token, HALF, PAIRS)
        at = token * (GROUPS * WIDTH * SIZE)
        row = mixed + at
        into = out + at
        above = of_query + token * (HEADS * SIZE)
        q1, q2, q3 = heads_backward(
            above, row, q_weight, into, first, second, others, c, s, eps, q1, q2, q3, HEADS, PER, WIDTH, SIZE, NORM
        )
        row += PER * SIZE
        into += PER * SIZE
        above = of_key + token * (GROUPS * SIZE)
        k1, k2, k3 = heads_backward(
            above, row, k_weight, into, first, second, others, c, s, eps, k1, k2, k3, GROUPS, 1, WIDTH, SIZE, NORM
        )
        copy_heads(of_value + token * (GROUPS * SIZE), into + SIZE, SIZE, WIDTH * SIZE, GROUPS, SIZE, PAIRS)
    if NEEDS_WEIGHTS:
        sums = partial + tl.program_id(0).to(tl.int64) * (2 * SIZE)
        store_sums(sums, q1, q2, q3, first, second, others, SIZE)
        store_sums(sums + SIZE, k1, k2, k3, first, second, others, SIZE)


@triton.jit
def places(  # type: ignore[no-untyped-def]
    SIZE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr
):
    """Returns the indices of first and second elements of pairs [PAIRS] and of the rest [REST]; SIZE marks padding."""
    pair = tl.arange(0, PAIRS)
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + HALF
    if PAIRS > HALF:  # skipped if possible, so that the compiler sees contiguous entries
        first = tl.where(pair < HALF, first, SIZE)
        second = tl.where(pair < HALF, second, SIZE)
    return first, second, 2 * HALF + tl.arange(0, REST)


@triton.jit
def angles(cos, sin, token, HALF: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads a token's cos and sin [PAIRS]."""
    pair = tl.arange(0, PAIRS)
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)
    return c[None, :], s[None, :]


@triton.jit
def load_heads(start, place, kept, first, second, others, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads the three parts of the heads at `start` + `place` [HEADS], or zeros where `kept` [HEADS] is false."""
    head = start + place[:, None]
    kept = kept[:, None]
    a = tl.load(head + first[None, :], mask=kept & (first < SIZE)[None, :], other=0.0).to(tl.float32)
    b = tl.load(head + second[None, :], mask=kept & (second < SIZE)[None, :], other=0.0).to(tl.float32)
    c = tl.load(head + others[None, :], mask=kept & (others < SIZE)[None, :], other=0.0).to(tl.float32)
    return a, b, c


@triton.jit
def store_heads(start, place, kept, first, second, others, a, b, c, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores the three parts of the heads. Inverse of `load_heads`."""
    kind = start.dtype.element_ty
    head = start + place[:, None]
    kept = kept[:, None]
    tl.store(head + first[None, :], a.to(kind), mask=kept & (first < SIZE)[None, :])
    tl.store(head + second[None, :], b.to(kind), mask=kept & (second < SIZE)[None, :])
    tl.store(head + others[None, :], c.to(kind), mask=kept & (others < SIZE)[None, :])


@triton.jit
def load_weight(weight, first, second, others, SIZE: tl.constexpr, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads the norm weights for the three parts of a head, [1, ...] each."""
    a = tl.load(weight + first, mask=first < SIZE, other=0.0).to(tl.float32)
    b = tl.load(weight + second, mask=second < SIZE, other=0.0).to(tl.float32)
    c = tl.load(weight + others, mask=others < SIZE, other=0.0).to(tl.float32)
    if NORM == 2:
        a += 1.0
        b += 1.0
        c += 1.0
    return a[None, :], b[None, :], c[None, :]


@triton.jit
def product(a, b, c, x, y, z):  # type: ignore[no-untyped-def]
    """Returns the dot products [HEADS, 1] of heads (a, b, c) and heads (x, y, z), given in three parts each."""
    return (tl.sum(a * x, 1) + tl.sum(b * y, 1) + tl.sum(c * z, 1))[:, None]


@triton.jit
def heads_forward(  # type: ignore[no-untyped-def]
    row,
    out,
    weight,
    first,
    second,
    others,
    c,
    s,
    eps,
    COUNT: tl.constexpr,
    PER: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Computes COUNT query or key heads of one token from its projection at `row`, and writes them to `out`."""
    for start in range(0, COUNT, HEADS):
        head = start + tl.arange(0, HEADS)
        kept = head < COUNT
        place = ((head // PER) * WIDTH + head % PER) * SIZE
        x, y, z = load_heads(row, place, kept, first, second, others, SIZE)
        if NORM > 0:
            scale = tl.rsqrt(product(x, y, z, x, y, z) / SIZE + eps)
            u, v, w = load_weight(weight, first, second, others, SIZE, NORM)
            x = x * scale * u
            y = y * scale * v
            z = z * scale * w
        store_heads(out, head * SIZE, kept, first, second, others, x * c - y * s, y * c + x * s, z, SIZE)


@triton.jit
def heads_backward(  # type: ignore[no-untyped-def]
    grad,
    row,
    weight,
    out,
    first,
    second,
    others,
    c,
    s,
    eps,
    sum1,
    sum2,
    sum3,
    COUNT: tl.constexpr,
    PER: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Computes the gradient of COUNT heads of one token. Returns the running sums of the weight gradient."""
    for start in range(0, COUNT, HEADS):
        head = start + tl.arange(0, HEADS)
        kept = head < COUNT
        place = ((head // PER) * WIDTH + head % PER) * SIZE
        g, h, k = load_heads(grad, head * SIZE, kept, first, second, others, SIZE)
        turned = g * c + h * s
        h = h * c - g * s
        g = turned
        if NORM > 0:
            x, y, z = load_heads(row, place, kept, first, second, others, SIZE)
            scale = tl.rsqrt(product(x, y, z, x, y, z) / SIZE + eps)
            x = x * scale
            y = y * scale
            z = z * scale
            sum1 += g * x
            sum2 += h * y
            sum3 += k * z
            u, v, w = load_weight(weight, first, second, others, SIZE, NORM)
            mean = product(g * u, h * v, k * w, x, y, z) / SIZE
            g = (g * u - x * mean) * scale
            h = (h * v - y * mean) * scale
            k = (k * w - z * mean) * scale
        store_heads(out, place, kept, first, second, others, g, h, k, SIZE)
    return sum1, sum2, sum3


@triton.jit
def zero_sums(PAIRS: tl.constexpr, REST: tl.constexpr):  # type: ignore[no-untyped-def]
    return (
        tl.zeros([HEADS, PAIRS], dtype=tl.float32),
        tl.zeros([HEADS, PAIRS], dtype=tl.float32),
        tl.zeros([HEADS, REST], dtype=tl.float32),
    )


@triton.jit
def store_sums(out, sum1, sum2, sum3, first, second, others, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + first, tl.sum(sum1, 0), mask=first < SIZE)
    tl.store(out + second, tl.sum(sum2, 0), mask=second < SIZE)
    tl.store(out + others, tl.sum(sum3, 0), mask=others < SIZE)


@triton.jit
def copy_heads(  # type: ignore[no-untyped-def]
    source,
    target,
    SOURCE_STEP: tl.constexpr,
    TARGET_STEP: tl.constexpr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies COUNT heads of one token. Strides between heads: SOURCE_STEP in `source`, TARGET_STEP in `target`."""
    for start in range(0, COUNT, HEADS):
        head = start + tl.arange(0, HEADS)
        for left in range(0, SIZE, BLOCK):
            entry = left + tl.arange(0, BLOCK)
            inside = (head < COUNT)[:, None] & (entry < SIZE)[None, :]
            value = tl.load(source + head[:, None] * SOURCE_STEP + entry[None, :], mask=inside, other=0.0)
            tl.store(target + head[:, None] * TARGET_STEP + entry[None, :], value, mask=inside)
