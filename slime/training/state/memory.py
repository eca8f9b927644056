"""Sleeping: a colocated trainer lends its GPU memory to the engines by moving its storages to the host.

Works on storages, not tensors, so every view (a parameter into Megatron's contiguous buffer, a master weight into a
parameter) stays valid: the storage is emptied under it and filled again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from slime.training.state.host_arena import HostArena

_Away = tuple[torch.UntypedStorage, int, Tensor | None]
"""A storage that was emptied, its bytes, and their contents on the host; None: dropped."""


class HostStash:
    """Holds the contents of the storages of one device while the trainer sleeps, in one host arena.

    What was put away last comes back first.
    """

    def __init__(self, arena: HostArena, device: torch.device) -> None:
        self._arena, self._device = arena, device
        self._kept: list[tuple[tuple[int, int], list[_Away]]] = []
        """What each call put away, and how much of the arena was taken before it."""

    @property
    def empty(self) -> bool:
        """Whether everything is on the device."""
        return not self._kept

    def put_away(self, keep: Iterable[Tensor], drop: Iterable[Tensor] = ()) -> int:
        """Moves the storages of `keep` to the host and frees those of `drop` (gradients: zeros after waking).

        Adds to what is there already. Returns the bytes freed. Tensors of other devices are left alone.
        """
        mark = self._arena.mark()
        away: list[_Away] = [(s, s.nbytes(), self._copied(s)) for s in storages_of(keep, self._device)]
        away += [(s, s.nbytes(), None) for s in storages_of(drop, self._device)]
        self._settle()
        for storage, _, _ in away:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._kept.append((mark, away))
        return sum(num_bytes for _, num_bytes, _ in away)

    def take_back(self) -> None:
        """Restores every storage, bit for bit; dropped ones come back as zeros."""
        while self._kept:
            self.take_back_last()

    def take_back_last(self) -> None:
        """Restores what the last call of `put_away` took."""
        mark, away = self._kept.pop()
        for storage, num_bytes, host in away:
            storage.resize_(num_bytes)
            view = _as_bytes(storage)
            if host is None:
                view.zero_()
            else:
                view.copy_(host, non_blocking=True)
        self._settle()
        self._arena.rewind(mark)

    def _copied(self, storage: torch.UntypedStorage) -> Tensor:
        return self._arena.take(storage.nbytes()).copy_(_as_bytes(storage), non_blocking=True)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def storages_of(tensors: Iterable[Tensor], device: torch.device) -> Iterator[torch.UntypedStorage]:
    """The storages on `device` that hold anything, each once, in order."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def num_bytes_of(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Of their storages on `device`, each counted once."""
    return sum(storage.nbytes() for storage in storages_of(tensors, device))


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    empty: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
    view: Tensor = empty.set_(storage, 0, (storage.nbytes(),))
    return view
