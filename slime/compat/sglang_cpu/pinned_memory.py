"""Routed experts on a CPU.

SGLang keeps them on the host, in pinned memory, which only a GPU's driver gives. The cache is made of ordinary memory
instead: the module that makes it gets a `torch` whose `zeros` takes no notice of `pin_memory`.
"""

from __future__ import annotations

import types
from typing import Any

from slime.compat.report import PatchReport
from slime.compat.sglang_cpu.after_import import after_import, is_in_place

PINS = "sglang.srt.state_capturer.base"


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


def _unpin(module: types.ModuleType) -> None:
    if not isinstance(module.torch, _Unpinned):
        module.torch = _Unpinned(module.torch)  # type: ignore[attr-defined]


def experts_in_ordinary_memory(upstream: str) -> PatchReport:
    """Sees to it that the cache of routed experts asks for no pinned memory."""
    after_import(PINS, _unpin)
    return PatchReport(
        name="routed experts in ordinary memory",
        symptom="RuntimeError: Cannot access accelerator device, or a CUDA driver is missing, when a server starts "
        "with --enable-return-routed-experts",
        upstream=upstream,
        removal="BaseHostCache in sglang/srt/state_capturer/base.py asks for pinned memory on a GPU only",
        applied=True,
        took_effect=is_in_place(PINS),
    )
