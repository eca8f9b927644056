"""Products of a linear layer: weight gradients summed over micro-batches, and products in FP8.

Weight gradients: total [out, in] += grad [T, out].T @ inputs. `add_reference` does what autograd and a gradient hook
would do: it rounds the product to the model's dtype and then adds it to the float32 total. `add_fused` accumulates
inside the matmul, so it needs no temporary of the weight's size and never rounds the product to half precision. It
updates `total` in place and never waits for the device.

FP8: e4m3 codes, with one scale per 128 entries of an input's row and one per block of 128 x 128 entries of the weight
(the recipe of DeepSeek-V3, arXiv:2412.19437, section 3.3.2). `fp8_product` is used twice in training: y = x @ w.T in
the forward pass, and grad_x = grad_y @ w in the backward pass. Both quantise the weight in the same blocks, so the
backward pass uses the transposed codes and scales of the forward pass. Weight gradients are not computed in FP8: they
are sums over tokens, and scales shared by tokens would make them depend on how samples are packed.

The reference form dequantises both factors and multiplies them in float32. The fused form quantises with Triton kernels
and multiplies with DeepGEMM, which adds 128 products on tensor cores at a time and sums these in float32.

Invariants
1. Codes and scales of a row depend only on that row, so a token's product does not depend on the rest of the batch.
2. Codes and scales of a weight are bitwise those of `weights.quantised.formats.BlockFp8`, which engines compute with.
3. A row of zeros has zero codes. Other scales are at least 2^-100, because gradients are tiny.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slime.ops.select import DEEP_GEMM, name_of, triton_problems

GROUP = 128
"""Entries of a row, and rows and columns of a weight, that share a scale."""
E4M3_MAX = 448.0
LEAST_INPUT = 2.0**-90
"""Lower bound on the largest entry of a group of inputs, which keeps scales normal."""
LEAST_WEIGHT = 1e-4
"""The same for a block of a weight, as in engines."""


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns a @ b in their dtype, accumulated in float32 and rounded once.

    On a CPU, multiplies half precision in float32, up to 60 times faster if the CPU has no bf16 instructions.
    """
    if a.device.type != "cpu" or a.element_size() > 2:
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    whole = torch.mm(a.float(), b.float())
    return whole.to(a.dtype) if out is None else out.copy_(whole)


def add_reference(total: Tensor, grad: Tensor, inputs: Tensor) -> None:
    """total [out, in] += grad [T, out].T @ inputs [T, in], with the product in the dtype of grad and inputs."""
    total += product(grad.t(), inputs)


def add_fused(total: Tensor, grad: Tensor, inputs: Tensor) -> None:
    """Like `add_reference`, but accumulates in the dtype of `total` (float32 or the inputs' dtype). T can be 0."""
    if not grad.size(0):
        return
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), inputs)
    elif grad.is_cuda:
        torch.addmm(total, grad.t(), inputs, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(grad.t().to(total.dtype), inputs.to(total.dtype))


def fused_problem(device: torch.device) -> str | None:
    """Returns why `add_fused` cannot run on `device`, or None if it can. Tries it on a tiny bfloat16 product."""
    grad = torch.ones(16, 8, dtype=torch.bfloat16, device=device)
    total = torch.ones(8, 8, dtype=torch.float32, device=device)
    try:
        add_fused(total, grad, grad[:, :8])
        wrong = float((total - 17.0).abs().max())
    except (RuntimeError, TypeError) as error:
        return f"torch {torch.__version__}: {' '.join(str(error).split())[:200]}"
    return None if wrong == 0.0 else f"torch {torch.__version__}: a product of ones is off by {wrong}"


def fp8_product(x: Tensor, weight: Tensor, *, transposed: bool = False) -> Tensor:
    """x [T, in], weight [out, in] -> x @ weight.T [T, out]; transposed: x [T, out] -> x @ weight [T, in].

    The result has the dtype of x, which is bfloat16 in the fused form. T can be 0.
    """
    if name_of("fp8", x) != DEEP_GEMM:
        return fp8_reference(x, weight, transposed=transposed)
    kernels: Any = importlib.import_module("slime.ops.kernels.fp8")
    out = x.new_empty(x.size(0), weight.size(1 if transposed else 0))
    if x.size(0):
        gemm: Any = importlib.import_module(DEEP_GEMM)
        gemm.fp8_gemm_nt(kernels.by_rows(x), kernels.by_blocks(weight, transposed=transposed), out)
    return out


def fp8_reference(x: Tensor, weight: Tensor, *, transposed: bool = False) -> Tensor:
    rows, blocks = dequantised(*by_rows(x), of_rows=True), dequantised(*by_blocks(weight), of_rows=False)
    return (rows @ (blocks if transposed else blocks.t())).to(x.dtype)


def by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> e4m3 codes [T, K] and float32 scales [T, ceil(K / 128)]."""
    return _quantised(x, 1, LEAST_INPUT)


def by_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> e4m3 codes [N, K] and float32 scales [ceil(N / 128), ceil(K / 128)]."""
    return _quantised(weight, GROUP, LEAST_WEIGHT)


def _quantised(x: Tensor, height: int, least: float) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    padded = functional.pad(x, (0, -columns % GROUP, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, GROUP)).unflatten(0, (-1, height)).float()
    scales = blocks.abs().amax((1, 3)).clamp(min=least) / E4M3_MAX
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(padded.shape)[:rows, :columns], scales


def dequantised(codes: Tensor, scales: Tensor, *, of_rows: bool) -> Tensor:
    """The float32 entries of codes [N, K]. `of_rows`: whether each row has its own scales, as opposed to a block."""
    wide = scales.repeat_interleave(GROUP, 1)[:, : codes.size(1)]
    return codes.float() * (wide if of_rows else wide.repeat_interleave(GROUP, 0)[: codes.size(0)])


def fp8_problems(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Returns why the fused form cannot run, or () if a trial run succeeds."""
    reasons = (
        *((reason, True) for reason in triton_problems(device, dtype)),
        (f"its kernels support bfloat16, not {dtype}", dtype != torch.bfloat16),
        ("deep_gemm is not installed (package sgl-deep-gemm)", importlib.util.find_spec(DEEP_GEMM) is None),
    )
    found = tuple(reason for reason, holds in reasons if holds)
    if found:
        return found
    if torch.cuda.get_device_capability(device)[0] != 9:
        return ("its kernels need a GPU of compute capability 9 (Hopper)",)
    try:
        _probe_fp8(device)
    except (RuntimeError, ImportError, AttributeError, AssertionError, OSError) as error:
        return (f"a trial run failed: {' '.join(str(error).split())[:200]}",)
    return ()


def _probe_fp8(device: torch.device) -> None:
    kernels: Any = importlib.import_module("slime.ops.kernels.fp8")
    gemm: Any = importlib.import_module(DEEP_GEMM)
    x, weight = (torch.ones(rows, GROUP, dtype=torch.bfloat16, device=device) for rows in (5, 2 * GROUP))
    out = torch.empty(5, 2 * GROUP, dtype=torch.bfloat16, device=device)
    gemm.fp8_gemm_nt(kernels.by_rows(x), kernels.by_blocks(weight, transposed=False), out)
    assert bool((out == GROUP).all()), "the result is wrong"
