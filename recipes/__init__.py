"""Tested runs: each folder has the code that prepares and starts one run. Here: what their scripts share."""

from __future__ import annotations

import time

SHAPES = ((2048, 576, 1536), (512, 576, 49152))
"""(tokens, inputs, outputs) of a layer of SmolLM2-135M and of its vocabulary."""
SECONDS = 0.5
"""For each shape and dtype."""
MIN_SPEEDUP = 1.5


def products_per_s(dtype: str, shape: tuple[int, int, int], seconds: float = SECONDS) -> float:
    """Returns the rate of products `x @ w.T` of one shape, after one product to warm up."""
    import torch

    (tokens, inputs, outputs), to = shape, getattr(torch, dtype)
    x, w = torch.randn(tokens, inputs).to(to), torch.randn(outputs, inputs).to(to)
    torch.nn.functional.linear(x, w)
    begin, num_done = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < seconds or not num_done:
        torch.nn.functional.linear(x, w)
        num_done += 1
    return num_done / elapsed


def dtype_flag() -> str:
    """Returns `--bf16` if this CPU's bfloat16 is at least `MIN_SPEEDUP` times as fast as its float32, else `--no-bf16`.

    A CPU with native bfloat16 need not be faster with it, and in float32 trainer and engine agree more closely.
    """
    float32, bfloat16 = (sum(1 / products_per_s(dtype, shape) for shape in SHAPES) for dtype in ("float32", "bfloat16"))
    return "--bf16" if float32 >= MIN_SPEEDUP * bfloat16 else "--no-bf16"
