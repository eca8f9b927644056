"""Routed experts on a CPU.

SGLang keeps them on the host, in pinned memory, which only a GPU's driver gives. The cache is made of ordinary memory
instead: the module that makes it gets a `torch` whose `zeros` takes no notice of `pin_memory`.

A forward pass writes into one buffer on the device, which is copied to the host before the next pass. With overlapped
scheduling the next pass runs before the copy is read, and a copy from a CPU to a CPU is the buffer itself: each token
would get the experts of the token after it. So it is copied here.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from slime.compat.report import PatchReport
from slime.compat.sglang_cpu.after_import import after_import, is_in_place

RECORDS = "sglang.srt.state_capturer.base"


class _Unpinned(types.ModuleType):
    """torch, but for `zeros`."""

    def __init__(self, torch: types.ModuleType) -> None:
        super().__init__("torch")
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def zeros(self, *size: Any, pin_memory: bool = False, **options: Any) -> Any:
        """`torch.zeros` in ordinary memory."""
        return self._torch.zeros(*size, **options)


def _copied(output: Any, to_host: Callable[[Any], Any]) -> None:
    """`TopkCaptureOutput.map_device_tensors`, by a copy."""
    output.out_cache_loc, output.topk = (to_host(x).clone() for x in (output.out_cache_loc, output.topk))


def _change(module: Any) -> None:
    if not isinstance(module.torch, _Unpinned):
        module.torch = _Unpinned(module.torch)
    module.TopkCaptureOutput.map_device_tensors = _copied


def experts_on_the_host(upstream: str) -> PatchReport:
    """Sees to it that routed experts are kept without a GPU, and that they are those of their token."""
    after_import(RECORDS, _change)
    return PatchReport(
        name="routed experts on the host",
        symptom="with --enable-return-routed-experts a server does not start (RuntimeError about pinned memory), or "
        "returns the experts of the next token",
        upstream=upstream,
        removal="sglang/srt/state_capturer/base.py asks for pinned memory on a GPU only, and copies on a CPU, too",
        applied=True,
        took_effect=is_in_place(RECORDS),
    )
