"""Turns the fused attention projection into queries, keys and values: split, per-head norm, rotary embedding.

A token's projection is laid out as [q ... q, k, v] per key head (group): the group's query heads, its key, its value.
Queries and keys can be normalized (RMSNorm over a head, see `norm`). The first r entries of a head are rotated by the
angles of the token's position (RoFormer, Su et al. 2021), in pairs (0, r / 2), (1, r / 2 + 1), ... or, if interleaved,
(0, 1), (2, 3), ...; the other entries are unchanged. cos and sin [T, r / 2] float32 are computed once per packed row
(`models.common.rotary.cos_sin`).

The reference is bitwise equal to Megatron's code (`SelfAttention.get_query_key_value_tensors`, `apply_rotary_pos_emb`).
The fused kernel rounds once, at the end, whereas the reference also rounds after the norm.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.ops import norm
from slime.ops.select import FUSED, name_of, num_processors


@dataclass(frozen=True, slots=True)
class Heads:
    groups: int
    """Number of key heads on this rank."""
    size: int
    """Number of entries per head."""
    interleaved: bool = False
    eps: float = 1e-6
    zero_centered: bool = False
    apart: bool = False
    """Whether a token's projection has all queries first, then all keys, then all values, as in engines."""


def split_and_rotate(
    mixed: Tensor, heads: Heads, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """mixed [T, groups * (n + 2) * d] -> query [T, groups * n, d], key and value [T, groups, d].

    `q_weight` and `k_weight` [d] are the norm weights, or both None. cos, sin [T, r / 2] float32.
    """
    assert (q_weight is None) == (k_weight is None), "only one of queries and keys has a norm"
    if name_of("qk_rotary", mixed) == FUSED:
        query, key, value = FusedHeads.apply(mixed, q_weight, k_weight, cos, sin, heads)
        return query, key, value
    return reference(mixed, heads, cos, sin, q_weight, k_weight)


def reference(
    mixed: Tensor, heads: Heads, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    size, per_group = heads.size, mixed.size(-1) // heads.groups - 2 * heads.size
    sizes = [per_group, size, size]  # of a group's queries, its key and its value
    if heads.apart:
        parts = mixed.split([n * heads.groups for n in sizes], dim=-1)
        query, key, value = (part.unflatten(-1, (heads.groups, -1)) for part in parts)
    else:
        query, key, value = mixed.unflatten(-1, (heads.groups, -1)).split(sizes, dim=-1)
    query = query.reshape(query.size(0), query.size(1) * query.size(2) // size, size)
    if q_weight is not None and k_weight is not None:
        query = norm.reference(query, q_weight, heads.eps, zero_centered=heads.zero_centered)
        key = norm.reference(key, k_weight, heads.eps, zero_centered=heads.zero_centered)
    query, key = (rotate(x, cos, sin, interleaved=heads.interleaved) for x in (query, key))
    return query, key, value


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """x [T, heads, d], cos and sin [T, r / 2] -> x with the first r entries of each head rotated."""
    rotated, passed = x.split([2 * cos.size(-1), x.size(-1) - 2 * cos.size(-1)], dim=-1)
    first, second = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    c, s = (t.unsqueeze(1).to(x.dtype) for t in (cos, sin))
    turned = first * c - second * s, second * c + first * s
    whole = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([whole, passed], dim=-1) if passed.size(-1) else whole


class FusedHeads(torch.autograd.Function):
    """One forward kernel, one backward kernel, and one that sums the gradients of the norm weights.

    With norms, the projection is saved for the backward pass anyway, so the values are a view of it. Without norms, it
    is not saved, and the values are copied.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        heads: Heads,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert cos.dtype == sin.dtype == torch.float32, f"cos in {cos.dtype}, sin in {sin.dtype}"
        assert cos.shape == sin.shape and cos.size(0) == mixed.size(0), f"{tuple(cos.shape)} for {tuple(mixed.shape)}"
        kernels: Any = importlib.import_module("slime.ops.kernels.qk_rotary")
        mixed = mixed.contiguous()
        weights = () if q_weight is None else (q_weight, k_weight)
        query, key, value = kernels.forward(mixed, heads, cos, sin, *weights)
        ctx.heads, ctx.width = heads, mixed.size(-1)
        ctx.save_for_backward(cos, sin, *((mixed, *weights) if weights else ()))
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernels: Any = importlib.import_module("slime.ops.kernels.qk_rotary")
        cos, sin, *normed = ctx.saved_tensors
        programs = 4 * num_processors(cos.device) if any(ctx.needs_input_grad[1:3]) else 0
        of_query, of_key, of_value = (grad.contiguous() for grad in grads)
        of_mixed, of_weights = kernels.backward(
            (of_query, of_key, of_value), ctx.heads, ctx.width, cos, sin, *normed, num_programs=programs
        )
        return of_mixed, *of_weights, None, None, None
