"""Bytes of many tensors as few flat views: what lies end to end in memory is one.

Experts of a layer are views of one parameter, thousands of them in a model; what is done to each apart costs more than
the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def byte_runs(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Flat uint8 views that hold the bytes of `tensors` in order; one that is not contiguous is copied."""
    runs: list[tuple[torch.UntypedStorage, int, int]] = []  # storage, first byte of it, behind the last
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        storage = whole.untyped_storage()
        start = int(whole.storage_offset()) * whole.element_size()
        end = start + whole.numel() * whole.element_size()
        if runs and runs[-1][2] == start and runs[-1][0].data_ptr() == storage.data_ptr():
            start = runs.pop()[1]
        runs.append((storage, start, end))
    return [_bytes_of(*run) for run in runs]


def _bytes_of(storage: torch.UntypedStorage, start: int, end: int) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, start, (end - start,))  # type: ignore[call-overload]
