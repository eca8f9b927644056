"""Arithmetic that does not depend on the batch: one token gives the same bits alone and among others, on a CPU. The
oracle of the values is plain PyTorch in float64.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slime.compat.sglang_trainer_kernels import ATTENTION
from slime.models import FAMILIES
from slime.ops import attention, invariant, norm, qk_rotary
from slime.ops.qk_rotary import Heads

DTYPES = (torch.float32, torch.bfloat16)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(first=st.integers(0, 60), num=st.integers(1, 70), dtype=st.sampled_from(DTYPES))
def test_a_row_of_a_product_does_not_depend_on_the_others(first: int, num: int, dtype: torch.dtype) -> None:
    a, b = draw(130, 96, dtype=dtype), draw(96, 50, dtype=dtype, seed=1)
    whole = invariant.tiled_product(a, b)
    assert torch.equal(invariant.tiled_product(a[first : first + num], b), whole[first : first + num])
    assert torch.allclose(whole.double(), a.double() @ b.double(), rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_query_alone_attends_as_among_others(groups: int, dtype: torch.dtype) -> None:
    query, key, value = (draw(150, n, 16, dtype=dtype, seed=n) for n in (4, groups, groups))
    whole = invariant.attend_in_tiles(query, key, value, scale=0.25)
    for first, last in [(0, 1), (63, 64), (64, 65), (149, 150), (100, 150), (7, 140)]:
        part = invariant.attend_in_tiles(query[first:last], key[:last], value[:last], scale=0.25)
        assert torch.equal(part, whole[first:last]), (first, last)
    wanted = attention.per_sequence(query.double(), key.double(), value.double(), [150], [150], scale=0.25)
    assert torch.allclose(whole.double(), wanted, atol=ROUNDING[dtype])


def test_gradients_of_attention_are_those_of_the_formula() -> None:
    lengths = (70, 1, 30)
    query, key, value = (draw(101, n, 8, seed=n).double().requires_grad_() for n in (4, 2, 2))
    got = invariant.attend(query, key, value, (None, None), (lengths, lengths))
    want = attention.per_sequence(query, key, value, lengths, lengths)
    above = draw(*got.shape, seed=9).double()
    for a, b in zip(*(torch.autograd.grad(x, (query, key, value), above) for x in (got, want)), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probs_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    logits, temperatures = 3 * draw(20, 1001, dtype=dtype), torch.linspace(0.3, 1.7, 20)
    whole = invariant.log_softmax(logits, temperatures)
    wanted = torch.log_softmax(logits.double() / temperatures.double().unsqueeze(1), dim=-1)
    assert torch.allclose(whole.double(), wanted, atol=1e-4)
    for i in (0, 7, 19):
        alone = invariant.log_softmax(logits[i : i + 1], temperatures[i : i + 1])
        assert torch.equal(alone, whole[i : i + 1])
    tokens = torch.arange(20) * 50
    assert torch.equal(invariant.log_probs_of(logits, temperatures, tokens), whole.gather(1, tokens[:, None])[:, 0])


def test_heads_that_are_apart_are_those_of_a_fused_projection() -> None:
    """Engines put all queries first, then all keys and all values; the trainer, those of each group."""
    groups, size = 2, 8
    mixed, (q_weight, k_weight) = draw(5, groups * 5 * size), draw(2, size, seed=1)
    cos, sin = draw(2, 5, size // 2, seed=2)
    query, key, value = (part.flatten(1) for part in mixed.unflatten(1, (groups, 5, size)).split([3, 1, 1], dim=2))
    apart = torch.cat([query, key, value], dim=1)
    want = qk_rotary.split_and_rotate(mixed, Heads(groups, size), cos, sin, q_weight, k_weight)
    got = qk_rotary.split_and_rotate(apart, Heads(groups, size, apart=True), cos, sin, q_weight, k_weight)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_residual_is_added_before_it_is_normalised() -> None:
    x, residual, weight = draw(6, 16), draw(6, 16, seed=1), draw(16, seed=2)
    total = x + residual
    out = norm.add_and_normalise(x, residual, weight, 1e-6)
    assert torch.equal(residual, total) and torch.equal(out, norm.rms_norm(total, weight, 1e-6))


def test_engines_have_hooks_for_the_families_that_lend_their_kernels() -> None:
    lending = {name for name, family in FAMILIES if family.lends_kernels}
    assert lending == set(ATTENTION)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.slow
def test_the_kernels_compute_the_formulas() -> None:
    """Interpreted on the CPU, in a process of its own: Triton decides when it is imported."""
    code = """
import torch
from slime.ops import invariant
from slime.ops.attention import per_sequence
from slime.ops.kernels import invariant as kernels

torch.manual_seed(0)
lengths = (70, 1, 30)
cu = torch.tensor([0, 70, 71, 101], dtype=torch.int32)
query, key, value = (torch.randn(101, n, 24) for n in (4, 2, 2))
out, sums = torch.empty_like(query), torch.empty(4, 101)
kernels.attend(query, key, value, out, cu, cu, 70, 0.25, log_totals=sums)
want = per_sequence(query.double(), key.double(), value.double(), lengths, lengths, scale=0.25)
assert float((out - want).abs().max()) < 1e-5
scores = (query[70] * key[70].repeat_interleave(2, 0)).sum(-1) * 0.25
assert torch.allclose(sums[:, 70], scores, atol=1e-5)
slots = torch.randperm(120)[:101]
keys, values = torch.full((120, 2, 24), 9.0), torch.full((120, 2, 24), 9.0)
keys[slots], values[slots] = key, value
one = torch.empty(1, 4, 24)
span = torch.tensor([0, 1], dtype=torch.int32)
kernels.attend(query[66:67], keys, values, one, span, None, 1, 0.25, cache=(keys, values, 67 * span, slots[:67]))
assert torch.allclose(one, out[66:67], atol=1e-5)
rest = torch.empty(30, 4, 24)
cache = keys, values, 40 * span, slots[:40]
kernels.attend(query[40:70], key[40:70], value[40:70], rest, 30 * span, 30 * span, 30, 0.25, cache=cache)
assert torch.allclose(rest, out[40:70], atol=1e-5)
x, weight = torch.randn(5, 100), torch.randn(70, 100)
assert torch.allclose(kernels.product(x, weight), x @ weight.T, atol=1e-4)
logits, temperatures = 3 * torch.randn(4, 9000), torch.tensor([0.7])
top, log_total = kernels.log_totals(logits, temperatures)
exact = (logits.double() / 0.7).logsumexp(1)
assert torch.allclose((top + log_total).double(), exact, atol=1e-4)

from slime.ops import norm, qk_rotary
from slime.ops.kernels import norm as norm_kernels, qk_rotary as heads_kernels

x, residual, weight = torch.randn(5, 40), torch.randn(5, 40), torch.randn(40)
total = x + residual
normed, _ = norm_kernels.forward(x, weight, 1e-6, False, residual)
assert torch.equal(residual, total)
assert torch.allclose(normed, norm.reference(total, weight, 1e-6), atol=1e-5)
mixed, cos, sin = torch.randn(5, 2 * 5 * 8), torch.randn(5, 4), torch.randn(5, 4)
heads = qk_rotary.Heads(2, 8, apart=True)
for weights in [(torch.randn(8), torch.randn(8)), ()]:
    got = heads_kernels.forward(mixed, heads, cos, sin, *weights)
    want = qk_rotary.reference(mixed, heads, cos, sin, *(weights or (None, None)))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env=environment)
