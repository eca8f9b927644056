"""One range of host memory per training rank, pinned in the background, from which everything put away gets its room.

Pinning storage by storage costs seconds of the first sleep; this is done once, beside the start of the engines, and
reused. Pages are touched before they are pinned: touching takes turns with other threads, pinning holds them up. The
driver pins whole pages and keeps no list of sizes, so nothing is rounded up to a power of two.

Consumes: a size. Produces: ranges [n] uint8, front to back. Waits for: the thread that pins, in `take` and `close`,
with a limit. Is woken by: that thread.

Invariants
1. Ranges that are taken do not overlap, and each begins at a multiple of `ALIGNMENT`.
2. A plan that was too small costs one more room and a warning, never a wrong bit.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress

import torch
from torch import Tensor

from slime.core.errors import DeadlineExceeded

logger = logging.getLogger(__name__)

ALIGNMENT = 512
"""Bytes. Enough for any dtype and for whole bursts of a copy engine."""
PIN_LIMIT_S, SLOWEST_PIN = 600.0, 100e6
"""Limit of the wait for the memory, and what is added: one second for so many bytes. Pinning takes about a second per
4 GB, and a busy host may have to write to its disk what lies there."""

Undo = Callable[[], None]
Pin = Callable[[Tensor], tuple[Tensor, Undo]]
"""Makes host memory reachable for the device: that memory or other in its place, and what undoes it."""


def pin_for(device: torch.device) -> Pin:
    """For a GPU; nothing is to be done for a CPU, which reads host memory as it is."""
    return (lambda memory: _page_lock(memory, device)) if device.type == "cuda" else (lambda memory: (memory, _nothing))


def _nothing() -> None:
    pass


def _page_lock(memory: Tensor, device: torch.device) -> tuple[Tensor, Undo]:
    torch.cuda.set_device(device)  # of this thread
    cudart, address, num_bytes = torch.cuda.cudart(), memory.data_ptr(), memory.numel()
    if num_bytes == 0:
        return memory, _nothing
    result = int(cudart.cudaHostRegister(address, num_bytes, 0))
    if result == 0:
        return memory, lambda: cudart.cudaHostUnregister(address)
    logger.warning(
        "got error %d of cudaHostRegister for %d bytes, because this host does not lock pages that are there; torch "
        "allocates them instead, up to twice as many",
        result,
        num_bytes,
    )
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True), _nothing


def room_of(num_bytes: int) -> int:
    """How much of an arena a range of `num_bytes` takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class HostArena:
    """Rooms of host memory and a mark of how much of them is taken. One thread takes and rewinds."""

    def __init__(self, num_bytes: int, pin: Pin, *, limit_s: float | None = None) -> None:
        """Starts to make a room of `num_bytes` and returns at once."""
        self._pin, self._limit_s = pin, PIN_LIMIT_S + num_bytes / SLOWEST_PIN if limit_s is None else limit_s
        self._rooms: list[Future[Tensor]] = []
        self._room, self._used = 0, 0
        self._undo: list[Undo] = []
        self._num_bytes = 0
        self._end = weakref.finalize(self, _give_back, self._rooms, self._undo)  # before the pages are unmapped
        self._end.atexit = False
        self._add_room(num_bytes)

    @property
    def num_bytes(self) -> int:
        """Of all rooms."""
        return self._num_bytes

    def take(self, num_bytes: int) -> Tensor:
        """The next free range, [num_bytes] uint8. Raises `DeadlineExceeded`, or what kept the memory from being there.

        Waits for the thread that pins, if it is not done.
        """
        while self._room < len(self._rooms):
            self._wait(self._rooms[self._room])
            room = self._rooms[self._room].result()
            if self._used + num_bytes <= room.numel():
                taken = room[self._used : self._used + num_bytes]
                self._used += room_of(num_bytes)
                return taken
            self._room, self._used = self._room + 1, 0
        logger.warning(
            "the host arena of %d bytes was planned too small; %d more are pinned", self.num_bytes, num_bytes
        )
        self._add_room(num_bytes)
        return self.take(num_bytes)

    def mark(self) -> tuple[int, int]:
        """How much is taken now, for `rewind`."""
        return self._room, self._used

    def rewind(self, mark: tuple[int, int]) -> None:
        """Ranges that were taken since `mark` are free again; what they hold may be written over."""
        self._room, self._used = mark

    def close(self) -> None:
        """Gives the memory back. Ranges must not be used any more."""
        for room in self._rooms:
            self._wait(room)
        self._end()

    def _add_room(self, num_bytes: int) -> None:
        room: Future[Tensor] = Future()
        self._rooms.append(room)
        self._num_bytes += room_of(num_bytes)
        threading.Thread(target=self._make, args=(room_of(num_bytes), room), name="host-arena", daemon=True).start()

    def _make(self, num_bytes: int, room: Future[Tensor]) -> None:
        began_s = time.monotonic()
        try:
            memory, undo = self._pin(_pages(num_bytes))
        except BaseException as error:
            room.set_exception(error)
            return
        self._undo.append(undo)
        room.set_result(memory)
        logger.info("pinned %.1f GB of host memory in %.1f s", num_bytes / 1e9, time.monotonic() - began_s)

    def _wait(self, room: Future[Tensor]) -> None:
        if not wait([room], timeout=self._limit_s).done:
            raise DeadlineExceeded.waiting(
                owner="training rank",
                for_what=f"{self.num_bytes} bytes of host memory to be pinned",
                limit_s=self._limit_s,
            )


def _give_back(rooms: list[Future[Tensor]], undo: list[Undo]) -> None:
    for each in undo:
        each()
    undo.clear()
    rooms.clear()


def _pages(num_bytes: int) -> Tensor:
    """Fresh memory [num_bytes] uint8 with all of its pages there; children that are forked do not get it."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a wish, which not every kernel knows
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(0)
