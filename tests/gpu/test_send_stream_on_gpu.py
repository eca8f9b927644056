"""A bucket leaves a GPU when it is filled, whatever the trainer has asked of the GPU since.

python -m pytest tests/gpu/test_send_stream_on_gpu.py
"""

from __future__ import annotations

import threading

import pytest
import torch

from slime.weights.delivery import SendStream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)
LONG_CYCLES = 20_000_000_000
"""Some ten seconds of a GPU."""


def test_what_is_filled_leaves_while_the_stream_of_the_trainer_is_busy() -> None:
    stream, bucket = SendStream(GPU), torch.zeros(1 << 20, device=GPU)
    seen: list[tuple[bool, float]] = []
    bucket.sum().cpu()  # a kernel that is loaded for the first time waits for the whole GPU
    bucket.fill_(3)
    filled = stream.filled()
    torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
    busy = torch.cuda.current_stream().record_event()

    def send() -> None:
        with stream.after(filled):
            total = float(bucket.sum().cpu())
        seen.append((busy.query(), total))

    sender = threading.Thread(target=send)
    sender.start()
    sender.join()
    assert seen == [(False, 3.0 * bucket.numel())], "it was sent, whole, before the trainer's stream came to its end"
    torch.cuda.synchronize()


def test_what_is_not_filled_yet_does_not_leave() -> None:
    stream, bucket = SendStream(GPU), torch.zeros(1 << 20, device=GPU)
    torch.cuda._sleep(LONG_CYCLES // 10)  # type: ignore[no-untyped-call]
    bucket.fill_(3)
    with stream.after(stream.filled()):
        assert float(bucket.sum().cpu()) == 3.0 * bucket.numel()
