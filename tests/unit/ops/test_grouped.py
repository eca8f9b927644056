"""A grouped product is that of a linear layer per group: value and gradients, whatever the sizes of the groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from slime.ops.experts import (
    RowGroups,
    form_of,
    grouped_linear,
    grouped_problems,
    interleave,
    permute_rows,
    weighted_swiglu,
)

SIZES = [(5, 3, 4), (0, 7, 0, 1), (1,), (0, 0, 9), (0, 0), (1, 1, 1), (300, 0, 2)]
IN, OUT = 24, 40


def _leaves(sizes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), IN, generator=generator).to(dtype).requires_grad_()
    return x, torch.randn(len(sizes), OUT, IN, generator=generator).to(dtype).requires_grad_()


def _groups(sizes: tuple[int, ...]) -> RowGroups:
    return RowGroups.of(torch.tensor(sizes), torch.device("cpu"))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_group_is_a_linear_layer_bit_for_bit(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = _leaves(sizes, dtype)
    groups = _groups(sizes)
    assert groups.sizes == list(sizes)
    out = grouped_linear(x, weight, groups, "reference")
    above = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = torch.autograd.grad(out, (x, weight), above)
    own = [w.detach().clone().requires_grad_() for w in weight]
    parts = [part.detach().requires_grad_() for part in x.split(sizes)]
    wanted = [functional.linear(part, w) for part, w in zip(parts, own, strict=True)]
    assert torch.equal(out, torch.cat(wanted))
    gradients = torch.autograd.grad(wanted, [*parts, *own], list(above.split(sizes)))
    assert torch.equal(got[0], torch.cat(gradients[: len(sizes)]))
    assert torch.equal(got[1], torch.stack(gradients[len(sizes) :])), "zeros for a group without rows"


def test_gradients_are_derivatives() -> None:
    x, weight = (leaf.detach().double().requires_grad_() for leaf in _leaves((2, 0, 3), torch.float32))
    groups = _groups((2, 0, 3))
    assert torch.autograd.gradcheck(lambda a, b: grouped_linear(a, b, groups, "reference"), (x, weight))


def test_what_is_frozen_costs_no_product() -> None:
    x, weight = _leaves((2, 3), torch.float32)
    out = grouped_linear(x, weight.detach(), _groups((2, 3)), "reference")
    (gradient,) = torch.autograd.grad(out.sum(), (x,))
    assert gradient.shape == x.shape


def test_a_cpu_has_the_reference() -> None:
    assert form_of(torch.zeros(1, dtype=torch.bfloat16)) == "reference"
    assert grouped_problems(torch.device("cpu"), torch.bfloat16) == ("its kernels need a GPU",)
    assert len(grouped_problems(torch.device("cpu"), torch.float32)) == 2, "every reason is said"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weighted_swiglu_rounds_each_factor(dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weights = torch.randn(7, 2 * OUT, generator=generator).to(dtype), torch.rand(7, generator=generator)
    weights = weights.to(weights_dtype)
    inner = functional.silu(x[:, :OUT]).to(dtype) * x[:, OUT:]
    want = (inner.to(dtype) * weights[:, None]).to(dtype)
    got = weighted_swiglu(x, weights, "reference")
    assert got.dtype == dtype and torch.equal(got, want)
    assert weighted_swiglu(x[:0], weights[:0], "reference").shape == (0, OUT)


@pytest.mark.parametrize("shape", [(2, 3), (1, 4), (4, 1), (3, 5)], ids=str)
def test_received_rows_are_sorted_by_expert_and_then_by_source(shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(sum(shape))
    sizes = generator.integers(0, 4, shape)
    sizes[0, 0] = 0
    num_rows, experts = int(sizes.sum()), np.tile(np.arange(shape[1]), shape[0]).repeat(sizes.ravel())
    order, inverse, groups = interleave(torch.from_numpy(sizes).int(), num_rows)
    assert order.tolist() == np.argsort(experts, kind="stable").tolist()
    assert order[inverse].tolist() == list(range(num_rows))
    assert groups.sizes == sizes.sum(0).tolist()
    x = torch.arange(2.0 * num_rows).view(num_rows, 2).requires_grad_()
    permute_rows(x, order, inverse).backward(torch.arange(2.0 * num_rows).view(num_rows, 2)[order])
    assert x.grad is not None and torch.equal(x.grad, x.detach())
