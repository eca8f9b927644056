"""When a bucket may leave a GPU: once it is filled, whatever the trainer asks of the GPU next.

Kernels of one stream run one after the other. A bucket that travels on the stream on which the next one is filled would
wait for that, and with it for other ranks, which may wait for the bucket: nobody would ever go on. So buckets travel on
a stream of their own, each behind the event that ended its filling.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@functools.cache
def departure_from(device: torch.device) -> Departure:
    """One for all weight syncs of a process."""
    return Departure(device)


class Departure:
    """Of the buckets of one training rank."""

    def __init__(self, device: torch.device) -> None:
        """On a CPU, what is asked for is done at once, and there is nothing to wait for."""
        import torch

        # Of another priority than all else: of equal ones torch has 32, and hands them out again and again.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def filled(self) -> torch.cuda.Event | None:
        """Who fills: all that was asked of the GPU so far."""
        import torch

        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

    @contextmanager
    def after(self, filled: torch.cuda.Event | None) -> Iterator[None]:
        """Who sends: what is asked of the GPU in here waits for that event, and for nothing else of the trainer."""
        import torch

        if self._stream is None or filled is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(filled)
            yield
