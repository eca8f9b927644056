"""Profile of a training call: the time of its parts, kernels, copies, waits of the host, idle time of the GPU.

Each kind of value comes from a separate call, because one measurement disturbs the others:
1. undisturbed calls, whose median time is the base of the idle fraction;
2. a call with timed parts, synchronising the device at the ends of each;
3. on a GPU, a call in which torch reports every operation that makes the host wait, with its line;
4. a call under `torch.profiler`.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.training.measure import counted_passes, settle, timed_call
from benchmarks.training.tree import PHASES, WITHOUT_SYNC, functions

ROWS = 40
"""Number of rows of each table."""
HOST_CALLS = (
    *("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync"),
    *("cudaMemsetAsync", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMalloc"),
    *("cudaFree", "cudaHostAlloc", "aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::copy_"),
    *("aten::to", "aten::cat", "aten::mm", "aten::_grouped_mm"),
)
"""Operations and driver calls to count."""
KINDS: tuple[tuple[str, str], ...] = (
    ("copies", r"^memcpy|^memset"),
    ("communication", r"nccl"),
    ("attention", r"flash|fmha|attention"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|splitk|grouped_mm|gemv"),
    ("optimizer and norms of gradients", r"multi_tensor|foreach|lpnorm"),
    ("compiled by Triton", r"triton"),
    ("gather, scatter, sort", r"index|scatter|gather|sort|radix|topk|scan|searchsorted"),
    ("concatenation", r"catarray"),
    ("reductions", r"reduce|softmax|norm"),
    ("elementwise", r"elementwise|fill|copy|unrolled"),
)
"""Kind of device work -> pattern of kernel names, in lower case; the first that matches counts."""


def profile(backend: Any, make_batch: Callable[[], Any], folder: Path | None, name: str) -> dict[str, Any]:
    """Profiles calls on batches of `make_batch` on all ranks. A rank with a `folder` writes NAME.txt there."""
    plain = [timed_call(backend, make_batch()) for _ in range(3)][1:]
    call_s = statistics.median(call["seconds"] for call in plain)
    parts = time_parts(backend, make_batch())
    sites = waits_of_host(backend, make_batch())
    found, tables = trace(backend, make_batch())
    busy = found.pop("busy_s")
    figures = {
        "calls": plain,
        "seconds": call_s,
        "device_busy_s": busy,
        "device_idle_share": None if busy is None else max(0.0, 1.0 - busy / call_s),
        "parts": parts,
        "waits_of_host": sites,
        **found,
    }
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(tables)
    return figures


def time_parts(backend: Any, batch: Any) -> dict[str, dict[str, float]]:
    """Returns the seconds and number of each part of one call. A nested part also counts in the part around it."""
    spent: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as stack:
        for part, names in PHASES.items():
            for module, name in functions(names):
                stack.enter_context(_timed(module, name, part, spent, backend.device))
        whole = timed_call(backend, batch)
    return {"whole call": {"seconds": whole["seconds"], "times": 1.0}, **spent}


@contextlib.contextmanager
def _timed(
    module: Any, name: str, part: str, spent: dict[str, dict[str, float]], device: torch.device
) -> Iterator[None]:
    original = getattr(module, name)
    waits = part not in WITHOUT_SYNC and device.type == "cuda"

    def timed(*given: Any, **named: Any) -> Any:
        if waits:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        try:
            return original(*given, **named)
        finally:
            if waits:
                torch.cuda.synchronize(device)
            own = spent.setdefault(part, {"seconds": 0.0, "times": 0.0})
            own["seconds"] += time.perf_counter() - start
            own["times"] += 1

    setattr(module, name, timed)
    try:
        yield
    finally:
        setattr(module, name, original)


def waits_of_host(backend: Any, batch: Any) -> dict[str, int]:
    """Returns file:line -> how often this line made the host wait for the device in one call; empty on a CPU."""
    if backend.device.type != "cuda":
        return {}
    settle(backend.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            backend.train(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    backend.weight_version += 1
    lines = Counter(_short(w.filename, w.lineno) for w in caught if "synchronizing" in str(w.message))
    return dict(lines.most_common())


def _short(file: str, line: int) -> str:
    for part in ("/site-packages/", "/dist-packages/", "/slime/"):
        if part in file:
            return ("slime/" if part == "/slime/" else "") + file.rpartition(part)[2] + f":{line}"
    return f"{'/'.join(Path(file).parts[-3:])}:{line}"


def trace(backend: Any, batch: Any) -> tuple[dict[str, Any], str]:
    """Returns (results of one call under `torch.profiler`, its tables)."""
    on_gpu = backend.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    settle(backend.device)
    with counted_passes(backend) as passes, torch.profiler.profile(activities=activities) as profiler:
        timed_call(backend, batch)
    device = _device_work(profiler) if on_gpu else []
    averages = profiler.key_averages()
    counts = {row.key: int(row.count) for row in averages if row.key in HOST_CALLS}
    layers = max(1, int(backend.hf_config["num_hidden_layers"]))
    copies = Counter(name for name, *_ in device if name.lower().startswith(("memcpy", "memset")))
    kernels = len(device) - copies.total()
    by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    tables = [averages.table(sort_by=key, row_limit=ROWS, max_name_column_width=90) for key in (by, _HOST)]
    found = {
        "layers": layers,
        "passes": passes,
        "kernels": kernels,
        "kernels_per_pass_and_layer": kernels / (sum(passes.values()) * layers),
        "copies": dict(copies.most_common()),
        "host_calls": counts,
        "device_time_by_kind_s": _by_kind(device),
        "by_device_time": _largest(averages, "self_device_time_total") if on_gpu else [],
        "by_host_time": _largest(averages, _HOST),
        "busy_s": _union_s(device) if on_gpu else None,
    }
    return found, "\n\n".join(tables)


_HOST = "self_cpu_time_total"


def _largest(averages: Any, figure: str) -> list[dict[str, Any]]:
    """Returns the `ROWS` largest entries by a time in microseconds."""
    rows = sorted(averages, key=lambda row: getattr(row, figure), reverse=True)[:ROWS]
    return [{"name": r.key, "seconds": getattr(r, figure) / 1e6, "times": int(r.count)} for r in rows]


def _device_work(profiler: Any) -> list[tuple[str, int, int]]:
    """Returns (name, start ns, end ns) of all work on the device."""
    out = []
    for event in profiler.profiler.kineto_results.events():
        # Ranges marked by the host also appear among the device's events.
        marks = (getattr(event, name, bool)() for name in ("is_user_annotation", "is_hidden_event"))
        if not str(event.device_type()).endswith("CUDA") or any(marks):
            continue
        out.append((event.name(), event.start_ns(), event.start_ns() + event.duration_ns()))
    return out


def _by_kind(device: list[tuple[str, int, int]]) -> dict[str, dict[str, float]]:
    sums: dict[str, dict[str, float]] = {}
    for name, start, end in device:
        low = name.lower()
        kind = next((kind for kind, pattern in KINDS if re.search(pattern, low)), "other")
        own = sums.setdefault(kind, {"seconds": 0.0, "times": 0.0})
        own["seconds"] += (end - start) / 1e9
        own["times"] += 1
    return dict(sorted(sums.items(), key=lambda item: -item[1]["seconds"]))


def _union_s(device: list[tuple[str, int, int]]) -> float:
    """Returns the seconds in which at least one interval was active."""
    busy, until = 0, 0
    for _, start, end in sorted(device, key=lambda work: work[1]):
        if end > until:
            busy += end - max(start, until)
            until = end
    return busy / 1e9
