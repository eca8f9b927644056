"""The measurements of one rank: the rate of a plain matrix product, training calls, memory, versions."""

from __future__ import annotations

import contextlib
import gc
import platform
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from slime.observability.run_folder import versions as installed_versions

PEAK_TFLOPS = {"H200": 989.4, "H100": 989.4, "GH200": 989.4, "B200": 2250.0, "A100": 312.0}
"""Part of a device's name -> dense bf16 10^12 FLOP/s of its data sheet, the base of model FLOPs utilisation."""
PACKAGES = ("torch", "triton", "megatron-core", "liger-kernel", "transformers", "numpy")


def settle(device: torch.device) -> None:
    """Waits for the device and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_tflops(device: torch.device) -> dict[str, Any]:
    """Returns 10^12 FLOP/s of `torch.mm` of random matrices: bf16 of size 8192 on a GPU, float32 of 512 on a CPU."""
    on_gpu = device.type == "cuda"
    size, dtype, times = (8192, torch.bfloat16, 20) if on_gpu else (512, torch.float32, 5)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(3):
        torch.mm(a, b, out=out)
    settle(device)
    start = time.perf_counter()
    for _ in range(times):
        torch.mm(a, b, out=out)
    if on_gpu:
        torch.cuda.synchronize(device)
    time_s = (time.perf_counter() - start) / times
    return {"size": size, "dtype": str(dtype).removeprefix("torch."), "tflops": 2 * size**3 / time_s / 1e12}


def timed_call(backend: Any, batch: Any) -> dict[str, float]:
    """Measures one training call, and increments the weight version, as the training actor does."""
    settle(backend.device)
    start = time.perf_counter()
    metrics = backend.train(batch)
    settle(backend.device)
    time_s = time.perf_counter() - start
    backend.weight_version += 1
    per_rank = backend.tflops(batch, 1.0)
    return {
        "seconds": time_s,
        "tokens": sum(s.num_tokens for s in batch.samples),
        "response_tokens": sum(s.response_length for s in batch.samples),
        "longest": max(s.num_tokens for s in batch.samples),
        "flops": per_rank * backend.parallel_info.world_size * 1e12,
        "tflops": per_rank / time_s,
        "loss": metrics.get("train/loss", float("nan")),
        "grad_norm": metrics.get("train/grad_norm", float("nan")),
    }


@contextlib.contextmanager
def counted_passes(backend: Any) -> Iterator[dict[str, int]]:
    """Counts the calls of this rank's first chunk in the block, with and without gradients."""
    counts = {"with_gradients": 0, "without": 0}

    def note(*_given: Any) -> None:
        counts["with_gradients" if torch.is_grad_enabled() else "without"] += 1

    handle = backend._trainable.chunks[0].register_forward_hook(note)
    try:
        yield counts
    finally:
        handle.remove()


def reset_peak(device: torch.device) -> None:
    """Resets memory peaks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_gb(device: torch.device) -> dict[str, float]:
    """Returns the 10^9 bytes on this rank's device, now and at the peak; empty on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "allocated": torch.cuda.memory_allocated(device) / 1e9,
        "peak_allocated": torch.cuda.max_memory_allocated(device) / 1e9,
        "peak_reserved": torch.cuda.max_memory_reserved(device) / 1e9,
    }


def over_ranks(value: Any) -> list[Any]:
    """Returns the value of every rank, by rank. Collective."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def largest(records: list[dict[str, float]]) -> dict[str, float]:
    """Returns the maximum of each number over ranks."""
    return {name: max(record[name] for record in records) for name in (records[0] if records else {})}


def summary(calls: list[dict[str, float]], matrix: list[float], device: torch.device) -> dict[str, Any]:
    """Returns the median call relative to matrix products of the same process, per GPU."""
    peak = peak_tflops(device)
    rate = statistics.median(call["tflops"] for call in calls)
    return {
        "median_s": statistics.median(call["seconds"] for call in calls),
        "tflops": rate,
        "tokens_per_s": statistics.median(call["tokens"] / call["seconds"] for call in calls),
        "matrix_tflops": statistics.fmean(matrix),
        "share_of_matrix": rate / statistics.fmean(matrix),
        "peak_tflops": peak,
        "mfu": rate / peak if peak else None,
    }


def peak_tflops(device: torch.device) -> float | None:
    """Returns the peak of the data sheet; None for an unlisted device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def versions(device: torch.device) -> dict[str, Any]:
    """Returns the versions of the packages that affect speed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"cuda": torch.version.cuda, **installed_versions(PACKAGES), "device": name}
