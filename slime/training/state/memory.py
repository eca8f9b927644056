"""Sleeping: a colocated trainer lends its GPU memory to the engines by moving its storages to the host.

Works on storages, not tensors, so every view (a parameter into Megatron's contiguous buffer, a master weight into a
parameter) stays valid: the storage is emptied under it and filled again. No effect on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class HostStash:
    """Holds the contents of device storages while the trainer sleeps."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    @property
    def asleep(self) -> bool:
        return bool(self._kept)

    def put_away(self, keep: Iterable[Tensor], drop: Iterable[Tensor] = ()) -> int:
        """Moves the storages of `keep` to the host and frees those of `drop` (gradients: zeros after waking).

        Returns the bytes freed on the device. CPU tensors are left alone.
        """
        assert not self._kept, "already asleep"
        freed = 0
        seen: set[int] = set()
        for tensors, keeps in ((keep, True), (drop, False)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if tensor.device.type != "cuda" or storage.nbytes() == 0 or storage.data_ptr() in seen:
                    continue
                seen.add(storage.data_ptr())
                self._kept.append((storage, storage.nbytes(), _to_host(storage, tensor.device) if keeps else None))
                freed += storage.nbytes()
        torch.cuda.synchronize()
        for storage, _, _ in self._kept:
            storage.resize_(0)
        torch.cuda.empty_cache()
        return freed

    def take_back(self) -> None:
        """Restores every storage, bit for bit; dropped ones come back as zeros."""
        for storage, num_bytes, host in self._kept:
            storage.resize_(num_bytes)
            view = _as_bytes(storage)
            if host is None:
                view.zero_()
            else:
                view.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        self._kept.clear()


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    empty: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
    view: Tensor = empty.set_(storage, 0, (storage.nbytes(),))
    return view


def _to_host(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.type == "cuda")
    return host.copy_(_as_bytes(storage), non_blocking=True)
