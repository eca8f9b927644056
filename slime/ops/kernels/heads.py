"""Device functions for the heads of one token: norm, rotation, copy, and gradients. Called by `kernels.qk_rotary`.

A program processes `HEADS` heads at a time, in float32. Each head is split into the first elements of its rotated
pairs, the second elements, and the rest (`places`). A projection has groups of WIDTH heads: head h of COUNT is head
h % PER of group h // PER. NORM is 0 without norms, 1 with norms, and 2 with zero-centered weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

HEADS = tl.constexpr(8)
"""Number of heads that a program processes at a time."""


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
