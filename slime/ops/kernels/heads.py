"""What kernels do to the heads of one token: norm, rotation, copy, and the gradient. Called by `kernels.qk_rotary`.

A head is held as the first members of its rotated pairs, the second members, and the rest, HEADS heads at a time. The
heads of a projection lie in groups of WIDTH heads: head h of COUNT is number h % PER + SHIFT of group h // PER. Sizes
are in entries; PAIRS, REST and HEADS are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def members(HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[PAIRS] places in a head of the first and of the second members of the rotated pairs."""
    pair = tl.arange(0, PAIRS)
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + HALF
    return first, second


@triton.jit
def weights(  # type: ignore[no-untyped-def]
    weight,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """What the members of a head are multiplied by: of the first, of the second, of the rest."""
    first, second = members(HALF, INTERLEAVED, PAIRS)
    pairs = tl.arange(0, PAIRS) < HALF
    others = 2 * HALF + tl.arange(0, REST)
    if NORMED:
        a = tl.load(weight + first, mask=pairs, other=0.0).to(tl.float32)
        b = tl.load(weight + second, mask=pairs, other=0.0).to(tl.float32)
        c = tl.load(weight + others, mask=others < SIZE, other=0.0).to(tl.float32)
        if CENTERED:
            a += 1.0
            b += 1.0
            c += 1.0
    else:
        a = tl.full([PAIRS], 1.0, tl.float32)
        b = tl.full([PAIRS], 1.0, tl.float32)
        c = tl.full([REST], 1.0, tl.float32)
    return a, b, c


@triton.jit
def heads_forward(  # type: ignore[no-untyped-def]
    row,
    out,
    weight,
    c,
    s,
    eps,
    COUNT: tl.constexpr,
    PER: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """The COUNT query or key heads of one token: `row` is its projection, `out` its heads."""
    kind = out.dtype.element_ty
    first, second = members(HALF, INTERLEAVED, PAIRS)
    pairs = tl.arange(0, PAIRS) < HALF
    others = 2 * HALF + tl.arange(0, REST)
    w1, w2, w3 = weights(weight, SIZE, HALF, INTERLEAVED, CENTERED, NORMED, PAIRS, REST)
    for start in range(0, COUNT, HEADS):
        head = start + tl.arange(0, HEADS)
        place = ((head // PER) * WIDTH + SHIFT + head % PER) * SIZE
        inside = (head < COUNT)[:, None] & pairs[None, :]
        besides = (head < COUNT)[:, None] & (others < SIZE)[None, :]
        x1 = tl.load(row + place[:, None] + first[None, :], mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(row + place[:, None] + second[None, :], mask=inside, other=0.0).to(tl.float32)
        x3 = tl.load(row + place[:, None] + others[None, :], mask=besides, other=0.0).to(tl.float32)
        if NORMED:
            total = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1) + tl.sum(x3 * x3, 1)
            inverse = tl.rsqrt(total / SIZE + eps)[:, None]
            x1 = x1 * inverse * w1[None, :]
            x2 = x2 * inverse * w2[None, :]
            x3 = x3 * inverse * w3[None, :]
        here = head[:, None] * SIZE
        tl.store(out + here + first[None, :], (x1 * c[None, :] - x2 * s[None, :]).to(kind), mask=inside)
        tl.store(out + here + second[None, :], (x2 * c[None, :] + x1 * s[None, :]).to(kind), mask=inside)
        tl.store(out + here + others[None, :], x3.to(kind), mask=besides)


@triton.jit
def copy_heads(  # type: ignore[no-untyped-def]
    source,
    target,
    SOURCE_STEP: tl.constexpr,
    TARGET_STEP: tl.constexpr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """COUNT heads of one token, from steps of SOURCE_STEP entries to steps of TARGET_STEP."""
    for start in range(0, COUNT, HEADS):
        head = start + tl.arange(0, HEADS)
        for left in range(0, SIZE, PAIRS):
            entry = left + tl.arange(0, PAIRS)
            inside = (head < COUNT)[:, None] & (entry < SIZE)[None, :]
            value = tl.load(source + head[:, None] * SOURCE_STEP + entry[None, :], mask=inside, other=0.0)
            tl.store(target + head[:, None] * TARGET_STEP + entry[None, :], value, mask=inside)


@triton.jit
def heads_backward(  # type: ignore[no-untyped-def]
    grad,
    row,
    weight,
    out,
    c,
    s,
    eps,
    sum1,
    sum2,
    sum3,
    COUNT: tl.constexpr,
    PER: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """The gradient of COUNT heads of one token; returns the sums of the weight's gradient with this token's added."""
    kind = out.dtype.element_ty
    first, second = members(HALF, INTERLEAVED, PAIRS)
    pairs = tl.arange(0, PAIRS) < HALF
    others = 2 * HALF + tl.arange(0, REST)
    w1, w2, w3 = weights(weight, SIZE, HALF, INTERLEAVED, CENTERED, NORMED, PAIRS, REST)
    for start in range(0, COUNT, HEADS):
        head = start + tl.arange(0, HEADS)
        place = (((head // PER) * WIDTH + SHIFT + head % PER) * SIZE)[:, None]
        inside = (head < COUNT)[:, None] & pairs[None, :]
        besides = (head < COUNT)[:, None] & (others < SIZE)[None, :]
        here = grad + head[:, None] * SIZE
        y1 = tl.load(here + first[None, :], mask=inside, other=0.0).to(tl.float32)
        y2 = tl.load(here + second[None, :], mask=inside, other=0.0).to(tl.float32)
        g3 = tl.load(here + others[None, :], mask=besides, other=0.0).to(tl.float32)
        g1 = y1 * c[None, :] + y2 * s[None, :]
        g2 = y2 * c[None, :] - y1 * s[None, :]
        if NORMED:
            x1 = tl.load(row + place + first[None, :], mask=inside, other=0.0).to(tl.float32)
            x2 = tl.load(row + place + second[None, :], mask=inside, other=0.0).to(tl.float32)
            x3 = tl.load(row + place + others[None, :], mask=besides, other=0.0).to(tl.float32)
            total = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1) + tl.sum(x3 * x3, 1)
            inverse = tl.rsqrt(total / SIZE + eps)[:, None]
            x1 = x1 * inverse
            x2 = x2 * inverse
            x3 = x3 * inverse
            sum1 += g1 * x1
            sum2 += g2 * x2
            sum3 += g3 * x3
            g1 = g1 * w1[None, :]
            g2 = g2 * w2[None, :]
            g3 = g3 * w3[None, :]
            mean = ((tl.sum(g1 * x1, 1) + tl.sum(g2 * x2, 1) + tl.sum(g3 * x3, 1)) / SIZE)[:, None]
            g1 = (g1 - x1 * mean) * inverse
            g2 = (g2 - x2 * mean) * inverse
            g3 = (g3 - x3 * mean) * inverse
        tl.store(out + place + first[None, :], g1.to(kind), mask=inside)
        tl.store(out + place + second[None, :], g2.to(kind), mask=inside)
        tl.store(out + place + others[None, :], g3.to(kind), mask=besides)
    return sum1, sum2, sum3


@triton.jit
def store_sums(  # type: ignore[no-untyped-def]
    out,
    sum1,
    sum2,
    sum3,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    first, second = members(HALF, INTERLEAVED, PAIRS)
    pairs = tl.arange(0, PAIRS) < HALF
    others = 2 * HALF + tl.arange(0, REST)
    tl.store(out + first, tl.sum(sum1, 0), mask=pairs)
    tl.store(out + second, tl.sum(sum2, 0), mask=pairs)
    tl.store(out + others, tl.sum(sum3, 0), mask=others < SIZE)
