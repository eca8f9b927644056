"""The gated delta rule of a layer, forward and backward: plain PyTorch and Triton kernels, alternately in one process.

python -m benchmarks.delta_net --out delta_net.json        needs a GPU, torch, Triton and this repository only

Inputs are bfloat16 and random, in sequences of one length each. Times are medians of five calls after two for warm-up.
Errors are relative to plain PyTorch in float64, over the first 2,048 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.ops.delta_rule import DeltaRule, chunked, fused

RULES: dict[str, DeltaRule] = {"plain PyTorch": chunked, "Triton": fused}
NAMES = ("out", "q", "k", "v", "g", "beta")
CHECKED = 2048


def inputs(tokens: int, heads: int, size: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Returns q, k, v [T, h, d], g, beta [T, h] as a layer makes them: rates in (0, 1), decays mostly near 1."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, heads, size, device="cuda").to(dtype) for _ in range(3))
    g = -torch.rand(tokens, heads, device="cuda") * 0.2
    return [x.requires_grad_() for x in (q, k, v, g, torch.rand(tokens, heads, device="cuda").to(dtype))]


def call(rule: DeltaRule, row: Sequence[Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
    """Returns the output and the gradients of its sum of squares."""
    out = rule(*row, lengths, None)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), row)]


def seconds(rule: DeltaRule, row: Sequence[Tensor], lengths: tuple[int, ...]) -> tuple[float, float]:
    """Returns the time of the forward pass and of both passes."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    out = rule(*row, lengths, None)
    events[1].record()
    torch.autograd.grad(out, row, torch.ones_like(out))
    events[2].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1e3, events[0].elapsed_time(events[2]) / 1e3


def measured(tokens: int, length: int, heads: int, size: int) -> dict[str, Any]:
    row, lengths = inputs(tokens, heads, size), (length,) * (tokens // length)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in RULES}
    peaks = {}
    for _ in range(7):
        for name, rule in RULES.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            times[name].append(seconds(rule, row, lengths))
            peaks[name] = torch.cuda.max_memory_allocated() - before
    found: dict[str, Any] = {"tokens": tokens, "length": length, "heads": heads, "head_size": size}
    for name, pairs in times.items():
        forward, both = (statistics.median(column) for column in zip(*pairs[2:], strict=True))
        found[name] = {"forward_s": forward, "both_s": both, "peak_bytes": peaks[name]}
    found["times faster"] = found["plain PyTorch"]["both_s"] / found["Triton"]["both_s"]
    return found


def errors(heads: int, size: int) -> dict[str, dict[str, float]]:
    """Returns the relative errors of the output and of the gradients, for each rule."""
    row, lengths = inputs(CHECKED, heads, size), (CHECKED // 2 - 1, CHECKED // 2 + 1)
    exact = call(chunked, [x.detach().double().requires_grad_() for x in row], lengths)
    found = {}
    for name, rule in RULES.items():
        pairs = zip(NAMES, call(rule, row, lengths), exact, strict=True)
        found[name] = {part: float((x.double() - y).norm() / y.norm()) for part, x, y in pairs}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-size", type=int, default=128, choices=(64, 128))
    options = parser.parse_args()
    sizes = options.heads, options.head_size
    result = {
        "command": "python -m benchmarks.delta_net --out delta_net.json",
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "relative errors": errors(*sizes),
        "times": [measured(tokens, length, *sizes) for tokens, length in ((4096, 4096), (32768, 32768), (32768, 2048))],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
