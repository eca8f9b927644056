"""Rates of two kernels on one GPU: linear products in FP8 and bfloat16, and FlashAttention 2 and 4.

python -m benchmarks.kernels --out kernels.json

Products have the shapes of a Qwen3-4B's and 8B's layers and 16,384 tokens; FP8 factors are quantised beforehand, and
FP8 weight gradients, which slime does not use, are measured for comparison. Attention has 32 query heads, 8 key heads
of 128 entries and 32,768 tokens. Each rate is the best of three series of ten calls. Needs sgl-deep-gemm and
flash-attn-4 for the new forms.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.ops import attention, linear
from slime.ops.kernels import fp8 as kernels
from slime.ops.select import DEEP_GEMM

SHAPES = {
    "4B qkv": (6144, 2560),
    "4B out": (2560, 4096),
    "4B gate and up": (19456, 2560),
    "4B down": (2560, 9728),
    "8B gate and up": (24576, 4096),
    "8B down": (4096, 12288),
}
TOKENS, ROW = 16384, 32768
LENGTHS = {"1 x 32768": [32768], "8 x 4096": [4096] * 8, "32 x 1024": [1024] * 32}


def seconds(call: Callable[[], Any]) -> float:
    for _ in range(3):
        call()
    found = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e4)
    return min(found)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def products(out: int, size: int) -> dict[str, int]:
    """TFLOP/s of the three products of a linear layer [out, size]."""
    gemm: Any = importlib.import_module(DEEP_GEMM)
    x, weight, grad = draw(TOKENS, size), draw(out, size), draw(TOKENS, out)
    total = torch.zeros(out, size, device="cuda")
    y, grad_x = torch.empty_like(grad), torch.empty_like(x)
    rows, grad_rows = kernels.by_rows(x), kernels.by_rows(grad)
    blocks, turned = (kernels.by_blocks(weight, transposed=t) for t in (False, True))
    columns, grad_columns = (linear.by_rows(tensor.t().contiguous()) for tensor in (x, grad))
    calls = {
        "bf16 forward": lambda: torch.mm(x, weight.t(), out=y),
        "bf16 gradient of inputs": lambda: torch.mm(grad, weight, out=grad_x),
        "bf16 gradient of weights": lambda: torch.addmm(total, grad.t(), x, out_dtype=torch.float32, out=total),
        "FP8 forward": lambda: gemm.fp8_gemm_nt(rows, blocks, y),
        "FP8 gradient of inputs": lambda: gemm.fp8_gemm_nt(grad_rows, turned, grad_x),
        "FP8 gradient of weights": lambda: gemm.fp8_gemm_nt(
            grad_columns, columns, total, c=total, recipe=(1, 1, linear.GROUP)
        ),
        "FP8 forward with quantisation": functools.partial(_with_quantisation, gemm, x, weight, y),
    }
    return {name: round(2 * TOKENS * out * size / seconds(call) / 1e12) for name, call in calls.items()}


def _with_quantisation(gemm: Any, x: Tensor, weight: Tensor, out: Tensor) -> None:
    gemm.fp8_gemm_nt(kernels.by_rows(x), kernels.by_blocks(weight, transposed=False), out)


def attends(form: Any, lengths: list[int]) -> dict[str, int]:
    """TFLOP/s of a causal forward pass, and of both passes."""
    query, key, value = (draw(ROW, heads, 128).requires_grad_() for heads in (32, 8, 8))
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    grad, flops = draw(ROW, 32, 128), sum(2 * n * n * 128 * 32 for n in lengths)

    def forward() -> Tensor:
        out: Tensor = form(query, key, value, ends, ends, max(lengths), max(lengths))
        return out

    with torch.no_grad():
        alone = seconds(forward)
    both = seconds(lambda: torch.autograd.grad(forward(), (query, key, value), grad))
    return {"forward": round(flops / alone / 1e12), "both passes": round(3.5 * flops / both / 1e12)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    record = {
        "command": "python -m benchmarks.kernels",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "products": {name: products(*shape) for name, shape in SHAPES.items()},
        "attention": {
            name: {
                "FlashAttention 2": attends(attention.flash, lengths),
                "FlashAttention 4": attends(attention.flash4, lengths),
            }
            for name, lengths in LENGTHS.items()
        },
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
