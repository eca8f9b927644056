"""Copies of rows: the gradient of a row is the sum of its copies', and no copy outlives the forward pass."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.ops.repeats import Repeats, repeat_rows, repeated

ROWS = np.array([2, 0, 2, 2, 4, 0, 5], np.int64)
NUM_ROWS = 7
"""Some rows have no copy."""


def repeats_of(rows: np.ndarray, num_rows: int) -> Repeats:
    return Repeats.of({name: torch.from_numpy(array) for name, array in Repeats.arrays(rows, num_rows).items()})


class Square(torch.autograd.Function):
    """Keeps its whole input, as kernels of attention do."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return 2 * x * grads[0]


def test_gradients_are_summed_over_the_copies() -> None:
    repeats, x = repeats_of(ROWS, NUM_ROWS), torch.randn(NUM_ROWS, 2, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(ROWS), 2, 3, dtype=torch.float64)
    (repeat_rows(x, repeats) * weights).sum().backward()
    want = torch.zeros(NUM_ROWS, 2, 3, dtype=torch.float64)
    for row, weight in zip(ROWS.tolist(), weights, strict=True):
        want[row] += weight
    assert x.grad is not None and torch.equal(x.grad, want)


def test_copies_of_a_block_are_made_again_and_not_kept() -> None:
    repeats = repeats_of(ROWS, NUM_ROWS)
    a, b = (torch.randn(NUM_ROWS, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with repeated((a, 2 * b), repeats) as (first, second):
        out = Square.apply(first) * Square.apply(second)
        alive = [weakref.ref(first), weakref.ref(second)]
        assert torch.equal(first, a[repeats.rows]) and torch.equal(second, 2 * b[repeats.rows])
    del first, second
    gc.collect()
    assert [one() for one in alive] == [None, None], "nothing holds them until the backward pass"
    got = torch.autograd.grad(out.sum(), (a, b))
    plain = (a[repeats.rows] ** 2 * (2 * b[repeats.rows]) ** 2).sum()
    for mine, want in zip(got, torch.autograd.grad(plain, (a, b)), strict=True):
        torch.testing.assert_close(mine, want)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_sums_as_the_formula_does() -> None:
    """Interpreted on the CPU, in a process of its own: Triton decides when it is imported."""
    code = (
        "import numpy as np, torch\n"
        "from slime.ops.kernels.norm import sum_repeats\n"
        "from slime.ops.repeats import Repeats\n"
        "for num_rows, num, size in ((7, 30, 5), (60, 100, 1500), (3, 0, 4), (1, 9, 64)):\n"
        "    rows = np.random.default_rng(0).integers(0, num_rows, num)\n"
        "    arrays = {name: torch.from_numpy(a) for name, a in Repeats.arrays(rows, num_rows).items()}\n"
        "    y = torch.randn(num, size)\n"
        "    want = torch.zeros(num_rows, size, dtype=torch.float64).index_add_(0, arrays['rows'], y.double())\n"
        "    got = sum_repeats(y, arrays['order'], arrays['starts'])\n"
        "    assert got.shape == want.shape and bool(((got - want).abs() < 1e-4).all())\n"
    )
    run_interpreted(code)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.slow
def test_sums_in_half_precision_are_rounded_once() -> None:
    """Law: however many copies, the sum is that of float64 but for the last digit, which Triton's interpreter cuts."""
    code = (
        "import numpy as np, torch\n"
        "from slime.ops.kernels.norm import sum_repeats\n"
        "from slime.ops.repeats import Repeats\n"
        "rows = np.random.default_rng(0).integers(0, 3, 400)\n"
        "arrays = {name: torch.from_numpy(a) for name, a in Repeats.arrays(rows, 3).items()}\n"
        "y = (1 + 0.1 * torch.randn(400, 64)).bfloat16()\n"
        "want = torch.zeros(3, 64, dtype=torch.float64).index_add_(0, arrays['rows'], y.double())\n"
        "got = sum_repeats(y, arrays['order'], arrays['starts'])\n"
        "assert got.dtype == torch.bfloat16 and bool(((got - want).abs() <= 2.0 ** -7 * want.abs()).all())\n"
    )
    run_interpreted(code)


def run_interpreted(code: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)
