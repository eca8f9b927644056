"""Log-probs and entropy, forward and backward: slime's chunked version and a naive version, in one process.

python -m benchmarks.log_probs            needs torch and this repository only; a GPU is used if there is one

The naive version keeps the logits of all tokens in float32: log_softmax, gather, entropy = -(p * log p).sum, autograd.
Peak memory is the increase over the inputs (hidden states, output weight, targets), including the gradients of both: on
a GPU from `torch.cuda.max_memory_allocated`, on a CPU the peak resident size of a child process. Times are medians. On
a CPU the JSON line also has processor time, which other processes disturb less. Prints a table and a JSON line. On a
GPU it takes less than two minutes, most of it `torch.compile`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slime.training.model import log_probs as ours
from slime.training.model.log_probs import VocabShard

MODES = {"no entropy": (False, False), "entropy": (True, False), "entropy with gradient": (True, True)}
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Shape:
    """Sizes of one measurement."""

    tokens: int
    vocab: int
    hidden: int
    dtype: str


GPU_SHAPE = Shape(16384, 151936, 1024, "bfloat16")
CPU_SHAPE = Shape(4096, 32768, 256, "float32")


def inputs(shape: Shape, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns hidden [T, H], weight [V, H] (logits of standard deviation 3), targets [T]."""
    torch.manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    hidden = torch.randn(shape.tokens, shape.hidden, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(shape.vocab, shape.hidden, device=device) * 3 / shape.hidden**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, shape.vocab, (shape.tokens,), device=device)


def naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, mode: str) -> torch.Tensor:
    """Returns the loss of the naive version."""
    with_entropy, entropy_grad = MODES[mode]
    log_p = torch.log_softmax((hidden @ weight.t()).float() / TEMPERATURE, dim=-1)
    loss = log_p.gather(1, targets.unsqueeze(1)).sum()
    if with_entropy:
        with contextlib.nullcontext() if entropy_grad else torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(dim=-1)
        loss = loss + 0.01 * entropy.sum()
    return loss


def chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, mode: str, **options: Any) -> Any:
    """Returns the same loss, computed by slime."""
    with_entropy, entropy_grad = MODES[mode]
    log_p, entropy = ours.token_log_probs(
        hidden,
        weight,
        targets,
        VocabShard(0, weight.size(0), None),
        temperature=TEMPERATURE,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
        **options,
    )
    return log_p.sum() if entropy is None else log_p.sum() + 0.01 * entropy.sum()


def measure_gpu(loss_of: Callable[..., torch.Tensor], data: Any, repeats: int) -> dict[str, float]:
    """Returns the milliseconds of forward and backward, and the peak GB above the inputs."""
    hidden, weight, _ = data
    times = []
    try:
        for turn in range(repeats + 2):
            hidden.grad = weight.grad = None
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            start = time.perf_counter()
            loss = loss_of(*data)
            loss.backward()
            torch.cuda.synchronize()
            if turn >= 2:
                times.append(time.perf_counter() - start)
            peak = torch.cuda.max_memory_allocated() - base
            value = loss.item()
            del loss
    except torch.cuda.OutOfMemoryError:
        return {"ms": float("nan"), "peak_gb": float("nan"), "loss": float("nan")}
    finally:
        hidden.grad = weight.grad = None
        gc.collect()
        torch.cuda.empty_cache()
    return {"ms": statistics.median(times) * 1e3, "peak_gb": peak / 1e9, "loss": value}


@contextlib.contextmanager
def patched(**names: Any) -> Iterator[None]:
    """Replaces functions and constants of the module for one variant."""
    before = {name: getattr(ours, name) for name in names}
    try:
        for name, value in names.items():
            setattr(ours, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(ours, name, value)


def variants() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Returns the variants as (name, options of the call, replaced names)."""
    for chunk in (512, 2048, 4096):
        yield f"chunk {chunk}", {"chunk_tokens": chunk}, {}
    yield "top-p 0.9", {"top_p": 0.9}, {}
    yield "top-p 0.9, top-k 64", {"top_p": 0.9, "top_k": 64}, {}
    yield "one kernel per operation", {}, {"_is_fused": lambda _: False}


def on_gpu(shape: Shape, repeats: int) -> dict[str, dict[str, float]]:
    """Returns all measurements by name."""
    data = inputs(shape, "cuda")
    out = {}
    for mode in MODES:
        out[f"naive: {mode}"] = measure_gpu(partial(naive, mode=mode), data, repeats)
        out[f"slime: {mode}"] = measure_gpu(partial(chunked, mode=mode), data, repeats)
    for name, options, names in variants():
        with patched(**names):
            try:
                result = measure_gpu(partial(chunked, mode="entropy with gradient", **options), data, repeats)
            except (RuntimeError, TypeError) as error:  # this version of torch does not support the variant
                sys.stderr.write(f"{name}: {str(error)[:300]}\n")
                continue
        out[f"variant: {name}"] = result
    return out


def child(shape: Shape, name: str, repeats: int) -> dict[str, float]:
    """Measures on a CPU, in this process. The peak is the largest resident size minus that before the first call."""
    kind, _, mode = name.partition(": ")
    data = inputs(shape, "cpu")
    small = inputs(Shape(8, 64, 16, shape.dtype), "cpu")
    call = naive if kind == "naive" else chunked
    call(*small, mode).backward()  # libraries allocate memory in their first call
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
    times, busy = [], []
    for _ in range(repeats):
        data[0].grad = data[1].grad = None
        start, busy_start = time.perf_counter(), time.process_time()
        loss = call(*data, mode)
        loss.backward()
        times.append(time.perf_counter() - start)
        busy.append(time.process_time() - busy_start)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024 - before
    middle = statistics.median(times), statistics.median(busy)
    return {"ms": middle[0] * 1e3, "cpu_ms": middle[1] * 1e3, "peak_gb": peak / 1e9, "loss": loss.item()}


def on_cpu(shape: Shape, repeats: int) -> dict[str, dict[str, float]]:
    """Returns all measurements, each from a separate process."""
    out = {}
    sizes = [f"--{key}={value}" for key, value in vars(shape).items()]
    for mode in MODES:
        for kind in ("naive", "slime"):
            name = f"{kind}: {mode}"
            command = [sys.executable, "-m", "benchmarks.log_probs", "--child", name, f"--repeats={repeats}", *sizes]
            answer = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
            out[name] = json.loads(answer.stdout.splitlines()[-1])
    return out


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", help="one CPU measurement in this process, as JSON")
    args = parser.parse_args()
    default = GPU_SHAPE if args.device == "cuda" and not args.child else CPU_SHAPE
    shape = Shape(*(getattr(args, key) or value for key, value in vars(default).items()))
    if args.child:
        print(json.dumps(child(shape, args.child, args.repeats)))
        return
    results = on_gpu(shape, args.repeats) if args.device == "cuda" else on_cpu(shape, args.repeats)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{shape}, torch {torch.__version__}, {where}; forward + backward, peak over the inputs")
    for name, result in results.items():
        against = results["naive: " + (name.split(": ")[1] if not name.startswith("variant") else list(MODES)[-1])]
        print(
            f"{name:48s} {result['ms']:9.1f} ms  {against['ms'] / result['ms']:5.2f} x naive's speed  "
            f"{result['peak_gb']:8.3f} GB  1/{against['peak_gb'] / result['peak_gb']:.1f} of naive's  "
            f"loss {result['loss']:.1f}"
        )
    print(json.dumps({"shape": vars(shape), "device": where, "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
