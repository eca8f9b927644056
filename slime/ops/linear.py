"""Accumulates the weight gradient of a linear layer over micro-batches: total [out, in] += grad [T, out].T @ inputs.

`add_reference` does what autograd and a gradient hook would do: it rounds the product to the model's dtype and then
adds it to the float32 total. `add_fused` accumulates inside the matmul, so it needs no temporary of the weight's size
and never rounds the product to half precision. It updates `total` in place and never waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
