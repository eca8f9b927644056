"""The gated delta rule over chunks equals the recurrence token by token, in value and gradient, for packed rows."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slime.core.errors import ConfigError
from slime.ops.delta_rule import CHUNK, DeltaRule, _table, chunked, delta_rule, fused
from tests.support.marks import quick

SIZES = (3, 5, 7)
"""Heads, d_k and d_v."""
KERNEL_SIZES = (2, 32, 16)


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The definition, with a state that starts anew at each sequence."""
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    out: list[Tensor] = []
    for row in zip(*(x.split(lengths) for x in (q, k, v, g, beta)), strict=True):
        state = q.new_zeros(*q.shape[1:], v.size(-1))
        for q_t, k_t, v_t, g_t, beta_t in zip(*row, strict=True):
            state = state * g_t.exp()[:, None, None]
            seen = torch.einsum("hkv,hk->hv", state, k_t)
            state = state + torch.einsum("hk,hv->hkv", k_t, beta_t[:, None] * (v_t - seen))
            out.append(torch.einsum("hkv,hk->hv", state, q_t) * q.size(-1) ** -0.5)
    return torch.stack(out)


def inputs(
    num_tokens: int, dtype: torch.dtype, decay: float = 1.0, sizes: tuple[int, int, int] = SIZES
) -> list[Tensor]:
    heads, d_k, d_v = sizes
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64)

    q, k, v = random(heads, d_k), random(heads, d_k), random(heads, d_v)
    g, beta = -decay * random(heads).exp(), random(heads).sigmoid()
    return [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta)]


@pytest.mark.parametrize("lengths", [(1,), (64,), (65, 3), (10, 200, 1, 64, 129), (5, 5)])
def test_chunks_equal_the_recurrence_in_value_and_gradient(lengths: tuple[int, ...]) -> None:
    x = inputs(sum(lengths), torch.float64)
    got, want = chunked(*x, lengths), token_by_token(*x, lengths)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)
    weights = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).view_as(want)
    for a, b in zip(
        torch.autograd.grad((got * weights).sum(), x), torch.autograd.grad((want * weights).sum(), x), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def check_borders(rule: DeltaRule, sizes: tuple[int, int, int] = KERNEL_SIZES) -> None:
    lengths = (70, 30)
    x = [t.detach() for t in inputs(100, torch.float32, sizes=sizes)]
    alone = rule(*(t[70:] for t in x), (30,))
    assert torch.equal(rule(*x, lengths)[70:], alone), "the second sequence depends on the first"
    x[0][:70] = torch.nan
    assert torch.equal(rule(*x, lengths)[70:], alone), "a NaN crossed the border of a sequence"


def test_a_sequence_does_not_know_its_neighbours() -> None:
    check_borders(chunked, SIZES)


def test_steep_decay_neither_overflows_nor_loses_gradients() -> None:
    x = inputs(130, torch.float32, decay=200.0)
    out = chunked(*x, (130,))
    for gradient in torch.autograd.grad(out.pow(2).sum(), x):
        assert gradient.isfinite().all(), "a decay beyond float32's range gave a gradient that is not finite"
    torch.testing.assert_close(out, token_by_token(*x, (130,)), rtol=1e-5, atol=1e-6)


def test_kernels_are_refused_where_they_cannot_run() -> None:
    cpu = torch.device("cpu")
    x = inputs(70, torch.float32)
    assert torch.equal(delta_rule(cpu, torch.float32)(*x, (70,)), chunked(*x, (70,))), "auto must fall back on a CPU"
    with pytest.raises(ConfigError, match=r"need a GPU.*use torch or auto"):
        delta_rule(cpu, torch.bfloat16, "fla")


def check_kernels(decay: float, dtype: torch.dtype, limit: float) -> None:
    """Compares value and gradients of the interpreted kernels with the definition in float64."""
    from slime.ops.kernels import delta_rule as kernels

    lengths = (3, 129)
    x = inputs(sum(lengths), dtype, decay, KERNEL_SIZES)
    exact = [t.detach().double().requires_grad_() for t in x]
    want = token_by_token(*exact, lengths)
    weights = torch.linspace(-1, 1, want.numel()).view_as(want).to(dtype)
    gradients = torch.autograd.grad((want * weights).sum(), exact)
    if dtype == torch.float32:
        out = fused(*x, lengths)
        got = [out, *torch.autograd.grad((out * weights).sum(), x)]
    else:  # the interpreter does not multiply in bfloat16
        plain, table = [t.detach() for t in x], kernels.Tiles(*_table(lengths, x[0].device))
        out, saved = kernels.forward(tuple(plain), table, "ieee")
        got = [out, *kernels.backward((weights, *plain[:3]), table, saved, "ieee")]
    for name, a, b in zip(("out", "q", "k", "v", "g", "beta"), got, (want.detach(), *gradients), strict=True):
        error = float((a.detach() - b).norm() / b.norm())
        assert error < limit, f"{name} differs by {error:.1e} of its norm for {dtype} and decay {decay}"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "check",
    quick(
        [
            "check_kernels(0.1, torch.float32, 2e-6)",
            "check_kernels(200.0, torch.float32, 1e-4)",
            "check_kernels(0.1, torch.bfloat16, 5e-3)",
            "check_borders(it.fused)",
        ],
        "check_kernels(0.1, torch.float32, 2e-6)",
        "check_borders(it.fused)",
    ),
)
def test_kernels_equal_the_recurrence_in_value_and_gradient_and_keep_sequences_apart(check: str) -> None:
    """Interpreted on the CPU, in a process of its own: Triton decides when it is imported."""
    code = f"import torch; from tests.unit.ops import test_delta_rule as it; it.{check}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env={**os.environ, "TRITON_INTERPRET": "1"})


class Kernels(TorchDispatchMode):
    """Counts the operations that are not views, each of which is at least one kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not operation.is_view
        return operation(*args, **(kwargs or {}))


def test_a_chunk_costs_a_few_kernels_of_its_own_in_each_direction() -> None:
    """Law: what grows with the length is one product per chunk forward, and one with its copy backward."""

    def counted(num_chunks: int) -> tuple[int, int]:
        lengths = (num_chunks * CHUNK,)
        q, k, v = (torch.randn(lengths[0], 2, 8, requires_grad=True) for _ in range(3))
        g, beta = -torch.rand(lengths[0], 2), torch.rand(lengths[0], 2)
        with Kernels() as forward:
            out = chunked(q, k, v, g, beta, lengths)
        with Kernels() as backward:
            out.sum().backward()
        return forward.num, backward.num

    (few_forward, few_backward), (forward, backward) = counted(5), counted(25)
    assert forward - few_forward <= 20 and backward - few_backward <= 2 * 20
