"""Kernels that split a fused projection into heads, norm and rotate queries and keys, and their gradient.

A program works on one token, a few heads at a time, so cos and sin of the token are read once. A head is held as the
first members of its rotated pairs, the second members, and the rest. The backward kernel reads the gradients of
queries, keys and values and writes that of the whole projection; where norms are trained its programs each go through
a share of the tokens and keep their part of the weights' gradients, which `column_sums` adds up.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slime.ops.kernels.heads import copy_heads, heads_backward, heads_forward, store_sums
from slime.ops.kernels.sums import column_sums

_HEADS = 8
"""Heads that a program works on at one time."""


def _sizes(heads: Any, width: int, half: int) -> dict[str, Any]:
    """What the kernels know at compile time, of a projection of `width` entries with `half` rotated pairs per head."""
    rest = heads.size - 2 * half
    assert rest >= 0 and half > 0, f"{half} pairs in a head of {heads.size}"
    return {
        "GROUPS": heads.groups,
        "PER_GROUP": width // (heads.groups * heads.size) - 2,
        "SIZE": heads.size,
        "HALF": half,
        "INTERLEAVED": heads.interleaved,
        "CENTERED": heads.zero_centered,
        "HEADS": _HEADS,
        "PAIRS": triton.next_power_of_2(half),
        "REST": max(16, triton.next_power_of_2(rest)),
        "num_warps": 4,
    }


def forward(
    mixed: Tensor, heads: Any, cos: Tensor, sin: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `qk_rotary.reference`. The values are a view of `mixed` [T, W], contiguous, where there are norms."""
    num_tokens, width = mixed.shape
    sizes = _sizes(heads, width, cos.size(-1))
    normed = q_weight is not None
    query = mixed.new_empty(num_tokens, heads.groups * sizes["PER_GROUP"], heads.size)
    key = mixed.new_empty(num_tokens, heads.groups, heads.size)
    value = mixed.unflatten(-1, (heads.groups, -1))[..., -heads.size :] if normed else torch.empty_like(key)
    if num_tokens:
        weights = (q_weight, k_weight) if normed else (mixed, mixed)  # not read without norms
        _forward[(num_tokens,)](
            mixed, query, key, value, *weights, cos.contiguous(), sin.contiguous(), heads.eps, NORMED=normed, **sizes
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
    """Gradients of query, key and value, contiguous -> those of the projection [T, W] and of the two weights.

    `num_programs`: among how many the tokens are shared where gradients of the weights are wanted; 0: they are not.
    """
    query, num_tokens = grads[0], grads[0].size(0)
    out = query.new_empty(num_tokens, width)
    normed = mixed is not None
    if not num_tokens:
        none = tuple(torch.zeros_like(w) if w is not None and num_programs else None for w in (q_weight, k_weight))
        return out, (none[0], none[1])
    sizes = _sizes(heads, width, cos.size(-1))
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
        NORMED=normed,
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
    NORMED: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CENTERED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    WIDTH: tl.constexpr = PER_GROUP + 2
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)
    row = mixed + token * (GROUPS * WIDTH * SIZE)
    of_query = query + token * (GROUPS * PER_GROUP * SIZE)
    of_key = key + token * (GROUPS * SIZE)
    heads_forward(
        row,
        of_query,
        q_weight,
        c,
        s,
        eps,
        GROUPS * PER_GROUP,
        PER_GROUP,
        0,
        WIDTH,
        SIZE,
        HALF,
        INTERLEAVED,
        CENTERED,
        NORMED,
        HEADS,
        PAIRS,
        REST,
    )
    heads_forward(
        row,
        of_key,
        k_weight,
        c,
        s,
        eps,
        GROUPS,
        1,
        PER_GROUP,
        WIDTH,
        SIZE,
        HALF,
        INTERLEAVED,
        CENTERED,
        NORMED,
        HEADS,
        PAIRS,
        REST,
    )
    if not NORMED:
        values = row + (PER_GROUP + 1) * SIZE
        copy_heads(values, value + token * (GROUPS * SIZE), WIDTH * SIZE, SIZE, GROUPS, SIZE, HEADS, PAIRS)


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
    NORMED: tl.constexpr,
    NEEDS_WEIGHTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CENTERED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    WIDTH: tl.constexpr = PER_GROUP + 2
    pair = tl.arange(0, PAIRS)
    q1 = tl.zeros([HEADS, PAIRS], dtype=tl.float32)
    q2 = tl.zeros([HEADS, PAIRS], dtype=tl.float32)
    q3 = tl.zeros([HEADS, REST], dtype=tl.float32)
    k1 = tl.zeros([HEADS, PAIRS], dtype=tl.float32)
    k2 = tl.zeros([HEADS, PAIRS], dtype=tl.float32)
    k3 = tl.zeros([HEADS, REST], dtype=tl.float32)
    for number in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        token = tl.cast(number, tl.int64)
        c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)
        s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)
        row = mixed + token * (GROUPS * WIDTH * SIZE)
        into = out + token * (GROUPS * WIDTH * SIZE)
        q1, q2, q3 = heads_backward(
            of_query + token * (GROUPS * PER_GROUP * SIZE),
            row,
            q_weight,
            into,
            c,
            s,
            eps,
            q1,
            q2,
            q3,
            GROUPS * PER_GROUP,
            PER_GROUP,
            0,
            WIDTH,
            SIZE,
            HALF,
            INTERLEAVED,
            CENTERED,
            NORMED,
            HEADS,
            PAIRS,
            REST,
        )
        k1, k2, k3 = heads_backward(
            of_key + token * (GROUPS * SIZE),
            row,
            k_weight,
            into,
            c,
            s,
            eps,
            k1,
            k2,
            k3,
            GROUPS,
            1,
            PER_GROUP,
            WIDTH,
            SIZE,
            HALF,
            INTERLEAVED,
            CENTERED,
            NORMED,
            HEADS,
            PAIRS,
            REST,
        )
        values = into + (PER_GROUP + 1) * SIZE
        copy_heads(of_value + token * (GROUPS * SIZE), values, SIZE, WIDTH * SIZE, GROUPS, SIZE, HEADS, PAIRS)
    if NEEDS_WEIGHTS:
        sums = partial + tl.program_id(0).to(tl.int64) * (2 * SIZE)
        store_sums(sums, q1, q2, q3, SIZE, HALF, INTERLEAVED, PAIRS, REST)
        store_sums(sums + SIZE, k1, k2, k3, SIZE, HALF, INTERLEAVED, PAIRS, REST)
