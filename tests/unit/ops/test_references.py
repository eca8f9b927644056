"""The references of `slime.ops` have the bits of the formulas that they replaced, in value and gradient, on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slime.ops import attention, norm, qk_rotary, swiglu

DTYPES = (torch.float32, torch.bfloat16)
shapes = st.tuples(st.integers(0, 5), st.integers(1, 40))
dtypes = st.sampled_from(DTYPES)


def value_and_gradients(formula: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    outs = formula(*leaves)
    generator = torch.Generator().manual_seed(7)
    grads = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outs]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, grads)]


def require_same(
    got: Callable[..., tuple[Tensor, ...]], want: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
) -> None:
    for a, b in zip(*(value_and_gradients(f, list(inputs)) for f in (got, want)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(shape=shapes, dtype=dtypes, zero_centered=st.booleans())
def test_a_norm_is_that_of_transformers(shape: tuple[int, int], dtype: torch.dtype, zero_centered: bool) -> None:
    def formula(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        if zero_centered:
            return ((normed * (1 + weight.float())).to(x.dtype),)
        return (weight * normed.to(x.dtype),)

    op = lambda x, weight: (norm.rms_norm(x, weight, 1e-6, zero_centered=zero_centered),)  # noqa: E731
    require_same(op, formula, draw(*shape, dtype=dtype), draw(shape[1], dtype=dtype, seed=1))


@given(shape=shapes, dtype=dtypes)
def test_an_activation_is_that_of_megatron(shape: tuple[int, int], dtype: torch.dtype) -> None:
    def formula(mixed: Tensor) -> tuple[Tensor]:
        gate, up = torch.chunk(mixed, 2, dim=-1)
        return (torch.nn.functional.silu(gate) * (up + 0.0),)

    require_same(lambda x: (swiglu.swiglu(x),), formula, draw(shape[0], 1, 2 * shape[1], dtype=dtype))


def megatron_heads(
    mixed: Tensor, heads: qk_rotary.Heads, angles: Tensor, weights: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Split, norms and rotation as in `SelfAttention` and `rope_utils` of megatron-core 0.16.1, for angles [T, r]."""
    size = heads.size
    grouped = mixed.view(mixed.size(0), 1, heads.groups, mixed.size(-1) // heads.groups)
    query, key, value = torch.split(grouped, [grouped.size(-1) - 2 * size, size, size], dim=3)
    query = query.reshape(query.size(0), 1, grouped.size(-1) // size * heads.groups - 2 * heads.groups, size)
    if weights:
        query, key = (norm.reference(x, w, heads.eps) for x, w in zip((query, key), weights, strict=True))

    def turn(t: Tensor) -> Tensor:
        t, passed = t[..., : angles.size(-1)], t[..., angles.size(-1) :]
        cos, sin = torch.cos(angles).to(t.dtype), torch.sin(angles).to(t.dtype)
        if heads.interleaved:
            half = torch.stack((-t[..., 1::2], t[..., ::2]), dim=-1).flatten(-2)
        else:
            first, second = torch.chunk(t, 2, dim=-1)
            half = torch.cat((-second, first), dim=-1)
        return torch.cat((t * cos + half * sin, passed), dim=-1)

    return turn(query).squeeze(1), turn(key).squeeze(1), value.squeeze(1)


@given(
    num_tokens=st.integers(0, 5),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    pairs=st.integers(1, 9),
    passed=st.sampled_from([0, 2, 8]),
    interleaved=st.booleans(),
    normed=st.booleans(),
    dtype=dtypes,
)
def test_heads_are_those_of_megatron(
    num_tokens: int,
    groups: int,
    per_group: int,
    pairs: int,
    passed: int,
    interleaved: bool,
    normed: bool,
    dtype: torch.dtype,
) -> None:
    size = 2 * pairs + passed
    heads = qk_rotary.Heads(groups, size, interleaved)
    angles = draw(num_tokens, pairs, seed=2) * 50
    twice = torch.stack([angles, angles], -1).flatten(1) if interleaved else torch.cat([angles, angles], -1)
    twice = twice.view(num_tokens, 1, 1, 2 * pairs)
    mixed = draw(num_tokens, groups * (per_group + 2) * size, dtype=dtype)
    weights = [draw(size, dtype=dtype, seed=3), draw(size, dtype=dtype, seed=4)] if normed else []

    def op(mixed: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        q_weight, k_weight = own if own else (None, None)
        return qk_rotary.split_and_rotate(mixed, heads, angles.cos(), angles.sin(), q_weight, k_weight)

    require_same(op, lambda mixed, *own: megatron_heads(mixed, heads, twice, own), mixed, *weights)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_product_of_query_and_key_depends_on_their_distance(interleaved: bool) -> None:
    """Law of rotary embedding (RoFormer, section 3.2)."""
    frequencies = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    query, key = (draw(1, 1, 8, seed=seed).double() for seed in (0, 1))

    def product(i: int, j: int) -> Tensor:
        turned = []
        for x, position in ((query, i), (key, j)):
            angles = position * frequencies.unsqueeze(0)
            turned.append(qk_rotary.rotate(x, angles.cos(), angles.sin(), interleaved=interleaved))
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(5, 3), product(105, 103))
    assert not torch.isclose(product(5, 3), product(5, 4))


@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3),
    groups=st.integers(1, 2),
    per_group=st.integers(1, 2),
)
def test_attention_sees_its_sequence_up_to_itself(lengths: list[tuple[int, int]], groups: int, per_group: int) -> None:
    """A sequence of n queries has n keys and those ahead of them; its last query is aligned with its last key."""
    queries, keys = [n for n, _ in lengths], [n + ahead for n, ahead in lengths]
    query = draw(sum(queries), groups * per_group, 4).double()
    key, value = (draw(sum(keys), groups, 4, seed=seed).double() for seed in (1, 2))
    got = attention.per_sequence(query, key, value, queries, keys)
    k, v = (x.repeat_interleave(per_group, dim=1) for x in (key, value))
    want, first = torch.empty_like(query), 0
    for number, (n, m) in enumerate(zip(queries, keys, strict=True)):
        start = sum(keys[:number])
        for i in range(n):
            seen = slice(start, start + m - n + i + 1)
            scores = torch.einsum("hd,khd->hk", query[first + i], k[seen]) / 2
            want[first + i] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[seen])
        first += n
    torch.testing.assert_close(got, want)
