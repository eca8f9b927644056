"""Kernels for the heads of one token: norm, rotation, copy, and the gradient. Called by `kernels.qk_rotary`.

Programs handle `HEADS` heads at a time, in float32. Each head is split into the first members of its rotated pairs, the
second members, and the rest (`places`). The heads of a projection are in groups of WIDTH heads: head h of COUNT is head
h % PER of group h // PER. NORM: 0 without norms, 1 with norms, 2 with zero-centered weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

HEADS = tl.constexpr(8)
"""The number of heads that a program handles at a time."""


@triton.jit
def places(  # type: ignore[no-untyped-def]
    SIZE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr
):
    """Indices of first and second members of a head's pairs, [PAIRS] each, and of the rest, [REST]; SIZE is padding."""
    pair = tl.arange(0, PAIRS)
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + HALF
    if PAIRS > HALF:  # otherwise unchanged, so that the compiler sees adjacent entries
        first = tl.where(pair < HALF, first, SIZE)
        second = tl.where(pair < HALF, second, SIZE)
    return first, second, 2 * HALF + tl.arange(0, REST)


@triton.jit
def angles(cos, sin, token, HALF: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads cos and sin [PAIRS] of a token."""
    pair = tl.arange(0, PAIRS)
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)
    return c[None, :], s[None, :]


@triton.jit
def load_heads(start, place, kept, first, second, others, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads the three parts of the heads at `start` + `place` [HEADS]; zeros where the mask `kept` [HEADS] is false."""
    head = start + place[:, None]
    kept = kept[:, None]
    a = tl.load(head + first[None, :], mask=kept & (first < SIZE)[None, :], other=0.0).to(tl.float32)
    b = tl.load(head + second[None, :], mask=kept & (second < SIZE)[None, :], other=0.0).to(tl.float32)
    c = tl.load(head + others[None, :], mask=kept & (others < SIZE)[None, :], other=0.0).to(tl.float32)
    return a, b, c


@triton.jit
def store_heads(start, place, kept, first, second, others, a, b, c, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores the three parts of heads; the inverse of `load_heads`."""
    kind = start.dtype.element_ty
    head = start + place[:, None]
    kept = kept[:, None]
    tl.store(head + first[None, :], a.to(kind), mask=kept & (first < SIZE)[None, :])
    tl.store(head + second[None, :], b.to(kind), mask=kept & (second < SIZE)[None, :])
    tl.store(head + others[None, :], c.to(kind), mask=kept & (others < SIZE)[None, :])


@triton.jit
def load_weight(weight, first, second, others, SIZE: tl.constexpr, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads the norm's weights for the three parts of a head, [1, ...] each."""
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
    """Returns the scalar products [HEADS, 1] of heads, each head in its three parts."""
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
    """Computes COUNT query or key heads of one token, from its projection at `row` to `out`."""
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
    """Computes the gradient of COUNT heads of one token. Returns the running sums of the weight's gradient."""
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
    """Copies COUNT heads of one token, SOURCE_STEP entries apart, to addresses that are TARGET_STEP entries apart."""
    for start in range(0, COUNT, HEADS):
        head = start + tl.arange(0, HEADS)
        for left in range(0, SIZE, BLOCK):
            entry = left + tl.arange(0, BLOCK)
            inside = (head < COUNT)[:, None] & (entry < SIZE)[None, :]
            value = tl.load(source + head[:, None] * SOURCE_STEP + entry[None, :], mask=inside, other=0.0)
            tl.store(target + head[:, None] * TARGET_STEP + entry[None, :], value, mask=inside)
