"""The weight gradient of a linear layer: both ways add one product, and the fused one loses fewer digits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slime.ops.linear import add_fused, add_reference, fused_problem

Add = Callable[[Tensor, Tensor, Tensor], None]
SHAPES = [(1, 1, 1), (1, 8, 24), (7, 3, 5), (300, 16, 8)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _data(tokens: int, out: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(tokens)
    grad = torch.randn(tokens, out, generator=draws).to(dtype)
    return grad, torch.randn(tokens, inputs, generator=draws).to(dtype)


@pytest.mark.parametrize("add", [add_reference, add_fused])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_added_is_the_product(shape: tuple[int, int, int], dtype: torch.dtype, add: Add) -> None:
    grad, inputs = _data(*shape, dtype)
    total = torch.full(shape[1:], 0.5)
    place = total.data_ptr()
    add(total, grad, inputs)
    want = 0.5 + grad.double().t() @ inputs.double()
    limit = 1e-5 if dtype == torch.float32 or add is add_fused else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(total.double(), want, rtol=limit, atol=limit * shape[0])
    assert total.data_ptr() == place and total.dtype == torch.float32


@pytest.mark.parametrize("add", [add_reference, add_fused])
def test_a_micro_batch_without_tokens_adds_nothing(add: Add) -> None:
    total = torch.ones(3, 4)
    add(total, torch.empty(0, 3, dtype=torch.bfloat16), torch.empty(0, 4, dtype=torch.bfloat16))
    assert torch.equal(total, torch.ones(3, 4))


def test_over_many_micro_batches_the_fused_sum_is_nearer_to_the_exact_one() -> None:
    fused, reference, exact = torch.zeros(16, 8), torch.zeros(16, 8), torch.zeros(16, 8, dtype=torch.float64)
    for tokens in range(20, 52):
        grad, inputs = _data(tokens, 16, 8, torch.bfloat16)
        add_fused(fused, grad, inputs)
        add_reference(reference, grad, inputs)
        exact += grad.double().t() @ inputs.double()
    errors = [float((total - exact).norm() / exact.norm()) for total in (fused, reference)]
    assert errors[0] < 1e-6 < errors[1] < 1e-2


def test_rows_of_a_larger_sum_can_be_added_to() -> None:
    """The output layer's padding rows stay as they are."""
    grad, inputs = _data(9, 5, 4, torch.bfloat16)
    total = torch.zeros(8, 4)
    add_fused(total[:5], grad, inputs)
    assert total[:5].abs().min() > 0 and torch.equal(total[5:], torch.zeros(3, 4))


def test_the_trial_product_finds_nothing_wrong_here() -> None:
    assert fused_problem(torch.device("cpu")) is None
